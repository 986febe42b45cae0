"""How ranks talk: the only place with point-to-point communication.

Messages of one *channel* (``channels``) between two ranks arrive in the order in which they are
sent. Sends return at once; receives are posted early and waited for late.
"""

from __future__ import annotations

import pickle
import queue
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import TransportError
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.runtime.transport.channels import Channel, Edge


class Receipt(ABC):
    """A message that was asked for."""

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """Its tensors, for what computes on the device from now on.

        On a GPU the device waits for them and the host goes on: to hold the host until another
        rank has come so far, use an object.

        Raises:
            TransportError: The peer died, or nothing came within the time limit.
        """


class Transport(ABC):
    """Point-to-point messages within one pipeline.

    Attributes:
        rank: This rank's place in the pipeline.
        num_ranks: Ranks in the pipeline.
        receives_early: Whether a receive may be posted before those whose messages come first.
        steps_under_way: Of how many steps messages may be under way at the end of another one.
        is_tight: Whether the end of a step waits for all that was sent in the one before it.
        link: Between neighbours, as measured at the start; None if it was not.
    """

    rank: int
    num_ranks: int
    receives_early = True
    steps_under_way = 1
    is_tight: bool = False
    link: Link | None = None

    def open(self, edges: Iterable[Edge]) -> None:  # noqa: B027 - most connect all ranks anyway
        """Get ready for tensors on these edges, before any of them is used.

        Every rank calls it at the same point of its program, with the same edges.
        """

    @abstractmethod
    def send(
        self,
        tensors: Sequence[Tensor],
        target: int,
        channel: Channel,
        specs: Sequence[TensorSpec] | None = None,
    ) -> None:
        """Send tensors; returns at once. They must not change until the step after next.

        Args:
            tensors: The message.
            target: Who receives it.
            channel: What it is for.
            specs: What the receiver asks for, and in which memory format; None: contiguous.
        """

    @abstractmethod
    def receive(self, specs: Sequence[TensorSpec], source: int, channel: Channel) -> Receipt:
        """Ask for the next message of a channel; its shapes must be known."""

    @abstractmethod
    def finish_step(self, *, in_training: bool = True) -> None:
        """Wait until what was sent ``steps_under_way`` steps ago, or before, has left.

        What the training has under way is taken when it goes on: the steps of an evaluation in
        between don't wait for it.
        """

    @abstractmethod
    def send_object(self, value: Any, target: int, channel: Channel = Channel.CONTROL) -> None:
        """Send any picklable value; returns at once."""

    @abstractmethod
    def receive_object(self, source: int, channel: Channel = Channel.CONTROL) -> Any:
        """Wait for the next object of a rank."""

    def close(self) -> None:  # noqa: B027 - most need nothing
        """This rank fails: let the others know at once; messages under way are lost."""

    def recycle(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027 - most need nothing
        """The tensors of a receipt are not needed any more."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The value of rank ``source``, on all ranks."""
        if self.rank != source:
            return self.receive_object(source)
        for target in range(self.num_ranks):
            if target != source:
                self.send_object(value, target)
        return value

    def gather_object(self, value: Any, target: int = 0) -> list[Any] | None:
        """The values of all ranks, on rank ``target``; None elsewhere."""
        if self.rank != target:
            self.send_object(value, target)
            return None
        return [
            value if source == target else self.receive_object(source)
            for source in range(self.num_ranks)
        ]


class _Mailbox:
    """One channel between two threads; messages are handed out by their number."""

    def __init__(self, timeout: float, description: str) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self._arrived: dict[int, Any] = {}
        self._num_arrived = 0
        self._num_asked = 0
        self._timeout = timeout
        self._description = description

    def put(self, message: Any) -> None:
        self._queue.put(message)

    def ask(self) -> int:
        """The number of the next message that nobody asked for yet."""
        self._num_asked += 1
        return self._num_asked - 1

    def take(self, number: int) -> Any:
        while number not in self._arrived:
            try:
                message = self._queue.get(timeout=self._timeout)
            except queue.Empty:
                raise TransportError(
                    f"{self._description} did not come within {self._timeout:.0f} s"
                ) from None
            self._arrived[self._num_arrived] = message
            self._num_arrived += 1
        return self._arrived.pop(number)


@dataclass
class _LocalReceipt(Receipt):
    mailbox: _Mailbox
    number: int

    @override
    def wait(self) -> list[Tensor]:
        tensors: list[Tensor] = self.mailbox.take(self.number)
        return tensors


class LocalNetwork:
    """Mailboxes between threads of one process: all that local transports share."""

    def __init__(self, num_ranks: int, timeout: float = 60.0) -> None:
        self.num_ranks = num_ranks
        self.timeout = timeout
        self._mailboxes = {
            (source, target, channel): _Mailbox(
                timeout, f"rank {target}: a message of rank {source}"
            )
            for source in range(num_ranks)
            for target in range(num_ranks)
            for channel in Channel
        }

    def mailbox(self, source: int, target: int, channel: Channel) -> _Mailbox:
        """The queue of one channel."""
        return self._mailboxes[source, target, channel]


class LocalTransport(Transport):
    """Ranks are threads of one process: for tests, and for ``devices=1``."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self.rank = rank
        self.num_ranks = network.num_ranks
        self._network = network

    @override
    def send(
        self,
        tensors: Sequence[Tensor],
        target: int,
        channel: Channel,
        specs: Sequence[TensorSpec] | None = None,
    ) -> None:
        self._network.mailbox(self.rank, target, channel).put([t.detach() for t in tensors])

    @override
    def receive(
        self,
        specs: Sequence[TensorSpec],
        source: int,
        channel: Channel,
    ) -> Receipt:
        mailbox = self._network.mailbox(source, self.rank, channel)
        return _LocalReceipt(mailbox, mailbox.ask())

    @override
    def finish_step(self, *, in_training: bool = True) -> None:
        """Nothing is under way."""

    @override
    def send_object(self, value: Any, target: int, channel: Channel = Channel.CONTROL) -> None:
        self._network.mailbox(self.rank, target, channel).put(pickle.dumps(value))

    @override
    def receive_object(self, source: int, channel: Channel = Channel.CONTROL) -> Any:
        mailbox = self._network.mailbox(source, self.rank, channel)
        return pickle.loads(mailbox.take(mailbox.ask()))  # noqa: S301 - of this process


def as_they_travel(
    tensors: Sequence[Tensor], specs: Sequence[TensorSpec] | None
) -> Iterator[Tensor]:
    """The tensors of a message, contiguous, in the memory format that the receiver asks for.

    Args:
        tensors: The message.
        specs: What is asked for; None: contiguous tensors.
    """
    if specs is None:
        yield from (tensor.detach().contiguous() for tensor in tensors)
    else:
        for tensor, spec in zip(tensors, specs, strict=True):
            yield spec.to_memory(tensor.detach()).contiguous()


class Outgoing:
    """What a rank has sent: it is kept until it has left.

    A dropped handle would lose the message, a changed tensor would spoil it.
    """

    def __init__(self) -> None:
        self._now: list[tuple[Any, Tensor]] = []
        self._in_training: deque[list[tuple[Any, Tensor]]] = deque()
        self._in_evaluation: list[tuple[Any, Tensor]] = []

    def add(self, work: Any, tensor: Tensor) -> None:
        """One more transfer, of this tensor."""
        self._now.append((work, tensor))

    def finish_step(
        self, steps_under_way: int, wait: Callable[[Any], None], *, in_training: bool
    ) -> None:
        """Wait for what was sent so many steps ago, or before; in evaluations, one step ago.

        It has been consumed by now, or its consumer is behind: then this rank waits for it, so that
        it can't run ahead without bounds.
        """
        _wait_for(self._in_evaluation, wait)
        if not in_training:
            self._in_evaluation = self._now
        else:
            self._in_evaluation = []
            while len(self._in_training) >= steps_under_way:
                _wait_for(self._in_training.popleft(), wait)
            self._in_training.append(self._now)
        self._now = []


def _wait_for(sent: list[tuple[Any, Tensor]], wait: Callable[[Any], None]) -> None:
    for work, _ in sent:
        wait(work)


def failure(rank: int, verb: str, peer: int | None, error: Exception) -> TransportError:
    """The error of a transfer that failed since a peer did."""
    who = "a peer" if peer is None else f"rank {peer}"
    reason = first_line(error)
    return TransportError(
        f"rank {rank} could not {verb} {who}: it ended or stalled ({reason}). "
        "The cause is in the output of that rank"
    )
