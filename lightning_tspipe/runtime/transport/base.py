"""How ranks talk: the only place with point-to-point communication.

Messages of one *channel* (``channels``) between two ranks arrive in the order in which they are
sent. Sends return at once; receives are posted early and waited for late.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.errors import TransportError
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.runtime.transport.channels import Channel, Edge, edges_along
from lightning_tspipe.runtime.transport.orders import Orders

Specs = Sequence[TensorSpec]
"""What the tensors of a message are like."""
NOMINAL = Link(1.5e-4, 4.0e9)
"""What plans assume that are made without measuring: processes of one machine."""
_SMALL = 8
_LARGE = {"cpu": 2**22, "cuda": 2**25}
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Receipt:
    """A message that was asked for.

    Attributes:
        wait: Its tensors, for what computes on the device from now on. On a GPU the device waits
            for them and the host goes on: to hold the host until another rank has come so far, use
            an object. A ``TransportError`` says that the peer died, or that nothing came in time.
    """

    wait: Callable[[], list[Tensor]]


class Transport(ABC):
    """Point-to-point messages within one pipeline, and what ranks make of them.

    Attributes:
        rank: This rank's place in the pipeline.
        num_ranks: Ranks in the pipeline.
        steps_under_way: Of how many steps messages may be under way at the end of another one.
        is_tight: Whether the end of a step waits for all that was sent in the one before it.
        link: Between neighbours, as measured at the start; None if it was not.
    """

    rank: int = 0
    num_ranks: int = 1
    steps_under_way = 1
    is_tight: bool = False
    link: Link | None = None

    @cached_property
    def orders(self) -> Orders:
        """Which orders of memory ranks have told each other."""
        return Orders(self.send_object, self.receive_object)

    def open(self, edges: Iterable[Edge]) -> None:  # noqa: B027 - most connect all ranks anyway
        """Get ready for tensors on these edges, before any of them is used.

        Every rank calls it at the same point of its program, with the same edges.
        """

    @abstractmethod
    def send(
        self, tensors: Sequence[Tensor], target: int, channel: Channel, specs: Specs | None = None
    ) -> None:
        """Send tensors; returns at once. They must not change until the step after next.

        Args:
            tensors: The message.
            target: Who receives it.
            channel: What it is for.
            specs: What the receiver asks for, and in which memory format; None: contiguous.
        """

    @abstractmethod
    def receive(self, specs: Specs, source: int, channel: Channel) -> Receipt:
        """Ask for the next message of a channel; its shapes must be known."""

    def finish_step(self, *, in_training: bool = True) -> None:  # noqa: B027 - one rank has none
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

    def close(self) -> None:  # noqa: B027 - some leave that to the end of the process
        """This rank fails: let the others know at once; messages under way are lost."""

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

    def gather_everywhere(self, value: Any) -> list[Any]:
        """The values of all ranks, on each of them."""
        found: list[Any] = self.broadcast_object(self.gather_object(value), 0)
        return found

    def sum_over_ranks(self, own: Tensor) -> Tensor:
        """The sum of a number over all ranks, on each of them; every rank calls it.

        It goes from the first rank to the last one, and back: two messages between neighbours,
        which are connected anyway, in the order of the ranks, so that rounding is the same on all.

        Args:
            own: This rank's, shape (), where its device is.

        Returns:
            The sum, of the same shape and type and on the same device.
        """
        self.open(edges_along(self.num_ranks))
        spec, before, after = [TensorSpec.of(own)], self.rank - 1, self.rank + 1
        total = own
        if before >= 0:
            (sum_before,) = self.receive(spec, before, Channel.SUMS).wait()
            total = sum_before + own
        if after < self.num_ranks:
            self.send([total], after, Channel.SUMS)
            (total,) = self.receive(spec, after, Channel.SUMS).wait()
        if before >= 0:
            self.send([total], before, Channel.SUMS)
        return total

    def measure_link(self, device: torch.device) -> None:
        """Measure the slowest link between neighbours; every rank calls it, and has the same then.

        Neighbours send a message there and back: half of the shortest time is that of one message,
        of a small one the latency, and the rest of a large one its bytes'. Every other pair does so
        at the same time. Numbers have one digit, so that two measurements give one plan as a rule.

        Args:
            device: Where this rank's tensors are.
        """
        self.open(edges_along(self.num_ranks))
        found = []
        large = _LARGE[device.type]
        for first in (0, 1):
            is_asked = (self.rank - first) % 2 == 1
            peer = self.rank - 1 if is_asked else self.rank + 1
            if 0 <= peer < self.num_ranks:
                short, long = (
                    self._there_and_back(peer, size, device, answers=is_asked) / 2
                    for size in (_SMALL, large)
                )
                if not is_asked:
                    # Where starting takes nearly all the time, how long the rest took is noise.
                    found.append((short, large / max(long - short, long / 10)))
        latencies, bandwidths = zip(*chain(*self.gather_everywhere(found)), strict=True)
        self.link = Link(*(float(f"{x:.0e}") for x in (max(latencies), min(bandwidths))))

    def _there_and_back(
        self, peer: int, size: int, device: torch.device, *, answers: bool
    ) -> float:
        """Seconds of the fastest message of so many bytes to the peer and back, after a first."""
        message = torch.ones(size, dtype=torch.uint8, device=device)
        spec, fastest = TensorSpec.of(message), math.inf
        for number in range(_ROUNDS + 1):
            started = time.perf_counter()
            if not answers:
                self.send([message], peer, Channel.PROBES)
            received = self.receive([spec], peer, Channel.PROBES).wait()
            if answers:
                self.send(received, peer, Channel.PROBES)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            if number:
                fastest = min(fastest, time.perf_counter() - started)
        return fastest


class Alone(Transport):
    """The transport of a pipeline of one rank, which has nobody to send anything to."""

    def _nobody(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a pipeline of one rank has sent, or asked for, a message")

    send = receive = send_object = receive_object = _nobody


def as_sent(tensors: Sequence[Tensor], specs: Specs | None) -> list[Tensor]:
    """Values of tensors, in the order of memory that their specs tell."""
    values = [tensor.detach() for tensor in tensors]
    if specs is None:
        return values
    return [spec.to_memory(value) for spec, value in zip(specs, values, strict=True)]


def failure(rank: int, verb: str, peer: int | None, reason: str) -> TransportError:
    """The error of a transfer that failed since a peer did."""
    who = "a peer" if peer is None else f"rank {peer}"
    return TransportError(f"rank {rank} could not {verb} {who}: it ended or stalled ({reason})")
