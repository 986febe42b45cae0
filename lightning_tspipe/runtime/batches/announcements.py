"""What the data rank tells the others about the batches to come, before anything of them travels.

Batches are numbered over all epochs. The data rank describes each one as early as its schedule
looks at it; another rank hears of as many as its own next step needs, and waits for no more::

    data rank   step 0: batches 0 1 2 3   step 1: 4   step 2: 5   step 3: no 6
    rank 0      step 0: 0 1               step 1: 2   step 2: 3   ...

An epoch that is left early leaves descriptions behind that nobody took. Every rank notices its end
by itself, and what was said in an earlier *round* is then skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_tspipe.runtime.batches.metadata import StepHeader
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import Channel


class Announcements:
    """One rank's view of what the data rank has said.

    Args:
        transport: How to reach the other ranks.
        data_rank: Who speaks.
        hear: Called with each word of a batch that the rank has come to, see ``stopping``.
        ask: Asks for what travels along with a description, if anything does.
    """

    def __init__(
        self,
        transport: Transport,
        data_rank: int,
        hear: Callable[[str], None],
        ask: Callable[[StepHeader], Receipt | None],
    ) -> None:
        self._transport = transport
        self._data_rank = data_rank
        self._hear = hear
        self._ask = ask
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
        for rank in range(self._transport.num_ranks):
            if rank != self._data_rank:
                said = (self._round, number, header, word)
                self._transport.send_object(said, rank, Channel.HEADERS)
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
                told, number_told, header, word = self._transport.receive_object(
                    self._data_rank, Channel.HEADERS
                )
                receipt = None if header is None else self._ask(header)
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
            self._hear(self._words.pop(due))

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
