"""Ranks as threads of one process, which send each other what they have."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.transport.base import Receipt, Specs, Transport, as_sent
from lightning_tspipe.runtime.transport.channels import Channel


class LocalNetwork:
    """What travels between threads of one process, in the order of its numbers.

    Args:
        num_ranks: Threads.
        timeout: Seconds that one may wait for a message.
    """

    def __init__(self, num_ranks: int, timeout: float = 60.0) -> None:
        self.num_ranks = num_ranks
        self._timeout = timeout
        self._messages: dict[tuple[int, ...], Future[Any]] = {}
        self._sent: defaultdict[tuple[int, ...], Any] = defaultdict(itertools.count)
        self._asked: defaultdict[tuple[int, ...], Any] = defaultdict(itertools.count)

    def put(self, message: Any, source: int, target: int, channel: int) -> None:
        """Send the next message of a channel."""
        way = source, target, channel
        self._messages.setdefault((*way, next(self._sent[way])), Future()).set_result(message)

    def ask(self, source: int, target: int, channel: int) -> Callable[[], Any]:
        """What waits for the next message of a channel that nobody asked for yet."""
        way = source, target, channel
        return partial(self._take, (*way, next(self._asked[way])))

    def _take(self, place: tuple[int, ...]) -> Any:
        try:
            return self._messages.setdefault(place, Future()).result(self._timeout)
        except TimeoutError:
            source, target, *_ = place
            raise TransportError(
                f"rank {target}: a message of rank {source} did not come within "
                f"{self._timeout:.0f} s"
            ) from None
        finally:
            del self._messages[place]


class LocalTransport(Transport):
    """One rank's end."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self.rank = rank
        self.num_ranks = network.num_ranks
        self._network = network

    @override
    def send(
        self, tensors: Sequence[Tensor], target: int, channel: Channel, specs: Specs | None = None
    ) -> None:
        sent = [tensor.contiguous() for tensor in as_sent(tensors, specs)]
        self._network.put(sent, self.rank, target, channel)

    @override
    def receive(self, specs: Specs, source: int, channel: Channel) -> Receipt:
        take = self._network.ask(source, self.rank, channel)

        def wait() -> list[Tensor]:
            pairs = zip(take(), specs, strict=True)
            return [spec.from_memory(tensor.view(spec.memory_shape)) for tensor, spec in pairs]

        return Receipt(wait)

    @override
    def finish_step(self, *, in_training: bool = True) -> None:
        """Nothing is under way."""

    @override
    def send_object(self, value: Any, target: int, channel: Channel = Channel.CONTROL) -> None:
        self._network.put(pickle.dumps(value), self.rank, target, channel)

    @override
    def receive_object(self, source: int, channel: Channel = Channel.CONTROL) -> Any:
        return pickle.loads(self._network.ask(source, self.rank, channel)())  # noqa: S301 - ours
