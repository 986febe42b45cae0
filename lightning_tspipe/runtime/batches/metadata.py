"""What the data rank tells the others about batches, before anything else of them travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import Channel


class Known(NamedTuple):
    """What the data rank knows of a batch before it runs, where activations are kept.

    Attributes:
        ids: Of its samples, in order; None where nothing is kept.
        num_atoms: What all of these samples gave behind so many atoms of a frozen part is known,
            so that nothing before has to run.
        rows: Those that go through the trunk of heads; None: all of them.
        is_checked: Whether what is known is compared with what comes out now.
    """

    ids: Any = None
    num_atoms: int = 0
    rows: tuple[int, ...] | None = None
    is_checked: bool = False

    def select(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Of the networks' inputs, those that have to go through them."""
        if self.rows is None or len(self.rows) == len(self.ids):
            return tuple(inputs)
        return tuple(tensor[list(self.rows)] for tensor in inputs)


NOTHING_KNOWN = Known()


@dataclass(frozen=True)
class StepHeader:
    """One batch, in shapes.

    Attributes:
        structure: Pytree structure of the batch.
        leaves: Its leaves; tensors as specs.
        inputs: Specs of the call inputs.
        stop: In an evaluation, what all ranks do after this batch, see ``stopping``; empty: go on.
        known: What is known of it before it runs.
    """

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    inputs: tuple[TensorSpec, ...]
    stop: str = ""
    known: Known = NOTHING_KNOWN

    @classmethod
    def of(
        cls, batch: Any, inputs: Sequence[Tensor], *, stop: str = "", known: Known = NOTHING_KNOWN
    ) -> StepHeader:
        """Describe a batch and the call inputs that were made of it."""
        leaves, structure = pytree.tree_flatten(batch)
        return cls(
            structure,
            tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves),
            tuple(map(TensorSpec.of, inputs)),
            stop,
            known,
        )

    @property
    def batch_size(self) -> int:
        """Samples of the largest call."""
        if self.known.rows is not None:
            return len(self.known.ids)
        return max(spec.shape[0] for spec in self.inputs)

    def send(self, transport: Transport) -> None:
        """Tell all other ranks."""
        transport.broadcast_object(self, transport.rank)

    @classmethod
    def receive(cls, transport: Transport, data_rank: int) -> StepHeader:
        """Hear from the data rank."""
        with waiting("the start of a step"):
            header = transport.receive_object(data_rank)
        assert isinstance(header, StepHeader), f"expected the header of a step, got {header!r}"
        return header

    def exchange_fields(  # noqa: PLR0913, PLR0917 - who gives what to whom
        self,
        fields: Sequence[int],
        batch: Any,
        transport: Transport,
        data_rank: int,
        channel: Channel,
        loss_ranks: Sequence[int] = (LOSS_RANK,),
    ) -> Receipt | None:
        """Send the fields that the step reads (data rank), or ask for them (loss ranks)."""
        rank = transport.rank
        if fields and rank == data_rank:
            leaves = pytree.tree_leaves(batch)
            sent = [leaves[i] for i in fields]
            for target in loss_ranks:
                if target != rank:
                    transport.send(sent, target, channel, list(map(TensorSpec.of, sent)))
        if not fields or rank == data_rank or rank not in loss_ranks:
            return None
        return transport.receive([self.leaves[i] for i in fields], data_rank, channel)

    def batch(self, fields: Sequence[int] = (), receipt: Receipt | None = None) -> Any:
        """The batch as a rank without data has it: meta tensors, and the fields it received."""
        leaves = [x.empty("meta") if isinstance(x, TensorSpec) else x for x in self.leaves]
        if receipt is not None:
            with waiting("the loss needs the batch"):
                received = receipt.wait()
            for index, tensor in zip(fields, received, strict=True):
                leaves[index] = tensor
        return pytree.tree_unflatten(leaves, self.structure)


@dataclass(eq=False)
class Announcements:
    """One rank's view of what the data rank has said of batches to come.

    Batches are numbered over all epochs. The data rank describes each one as early as its schedule
    looks at it; another rank hears of as many as its own next step needs, and waits for no more::

        data rank   step 0: batches 0 1 2 3   step 1: 4   step 2: 5   step 3: no 6
        rank 0      step 0: 0 1               step 1: 2   step 2: 3   ...

    An epoch that is left early leaves descriptions behind that nobody took. Every rank notices its
    end by itself, and what was said in an earlier *round* is then skipped.

    Attributes:
        transport: How to reach the other ranks.
        data_rank: Who speaks.
        heed: Called with each word of a batch that the rank has come to, see ``stopping``.
        ask: Asks for what travels along with a description, if anything does.
    """

    transport: Transport
    data_rank: int
    heed: Callable[[str], None]
    ask: Callable[[StepHeader], Receipt | None]

    def __post_init__(self) -> None:
        self._companions: dict[int, Receipt] = {}
        self._round = 0
        self._headers: dict[int, StepHeader] = {}
        self._words: dict[int, str] = {}
        self._end = -1

    def __contains__(self, number: int) -> bool:
        """Whether a batch is known."""
        return number in self._headers

    def __getitem__(self, number: int) -> StepHeader:
        """What is known of a batch."""
        return self._headers[number]

    def tell(self, number: int, header: StepHeader | None, word: str = "") -> None:
        """On the data rank: there is another batch, or (without a header) none for now.

        Args:
            number: Of the batch, the one after those told of before.
            header: What it is like.
            word: What all ranks do when they have come to it.
        """
        if header is None and self._end == number:
            return  # nobody listens any more
        for rank in range(self.transport.num_ranks):
            if rank != self.data_rank:
                said = (self._round, number, header, word)
                self.transport.send_object(said, rank, Channel.HEADERS)
        self._take(number, header, word)

    def await_batches(self, number: int, last: int) -> int:
        """Wait until the batches from ``number`` on are known, as far as there are any.

        Args:
            number: The batch whose step begins.
            last: The last one that this rank's step has to do with.

        Returns:
            The last one that is known, at most ``last``.
        """
        with waiting("the start of a step"):
            while last not in self._headers and not number < self._end <= last:
                told, number_told, header, word = self.transport.receive_object(
                    self.data_rank, Channel.HEADERS
                )
                receipt = None if header is None else self.ask(header)
                if told == self._round:
                    self._take(number_told, header, word)
                    if receipt is not None:
                        self._companions[number_told] = receipt
                elif receipt is not None:
                    receipt.wait()
        while last not in self._headers:
            last -= 1
        return last

    def hear(self, number: int) -> None:
        """Every rank has come to batch ``number``, or behind the last one: heed its word."""
        for due in [due for due in self._words if due <= number]:
            self.heed(self._words.pop(due))

    def companion(self, number: int) -> Receipt | None:
        """What travels along with the description of a batch."""
        return self._companions.pop(number, None)

    def forget(self, number: int) -> None:
        """The step of a batch is over."""
        self._headers.pop(number, None)

    def drop(self) -> None:
        """None of the batches that were told of will come; every rank calls it."""
        self._round += 1
        for receipt in self._companions.values():
            receipt.wait()
        self._companions.clear()
        self._headers.clear()
        self._words.clear()
        self._end = -1

    def _take(self, number: int, header: StepHeader | None, word: str) -> None:
        if header is None:
            self._end = number
        else:
            self._headers[number] = header
            self._end = -1
        if word:
            self._words[number] = word
