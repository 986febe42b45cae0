"""Ranks as threads whose tensors travel by NCCL's rules, each of them enforced.

One queue per lane of an edge; an edge must be opened, which holds both ranks until both have come;
no tags, so that what comes next must be what was asked for next; only types that NCCL has; memory
that is sent must stay as it is until it has left, and memory that is received into holds nothing
before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.transport.channels import Channel, Edge, lane_of
from lightning_tspipe.runtime.transport.wired import WIRE_TYPES, OrderedTransport, Wire
from tests.device import DEVICE
from tests.local_transport import LocalNetwork, LocalTransport


class BrokenRuleError(AssertionError):
    """Something that NCCL answers with a hang, with wrong data or with a crash."""


@dataclass
class _Transfer:
    """One end of a message."""

    tensor: Tensor
    channel: Channel
    bits: bytes = b""
    is_done: bool = False


@dataclass
class _Queue:
    """One lane of an edge."""

    edge: Edge
    present: set[int] = field(default_factory=set)
    sent: deque[_Transfer] = field(default_factory=deque)
    asked: deque[_Transfer] = field(default_factory=deque)

    def match(self) -> None:
        """Deliver whatever has both ends, in order."""
        while self.sent and self.asked:
            sent, asked = self.sent.popleft(), self.asked.popleft()
            self._check(sent, asked)
            asked.tensor.copy_(sent.tensor)
            sent.is_done = asked.is_done = True

    def _check(self, sent: _Transfer, asked: _Transfer) -> None:
        ends = [(x.channel.name, tuple(x.tensor.shape), x.tensor.dtype) for x in (sent, asked)]
        if ends[0] != ends[1]:
            raise BrokenRuleError(f"{self.edge}: sent {ends[0]}, asked for {ends[1]}")
        if _bits(sent.tensor) != sent.bits:
            raise BrokenRuleError(f"{self.edge}: {ends[0]} was changed while it was under way")


@dataclass
class _StrictWork:
    network: StrictNetwork
    transfer: _Transfer
    description: str

    def wait(self) -> None:
        """Until the message is here; a thread's host and its device are one."""
        self.network.wait_for(lambda: self.transfer.is_done, self.description)


class StrictNetwork:
    """All that the wires of a pipeline's threads share.

    Args:
        num_ranks: Ranks.
        timeout: Seconds that one may wait for another.
    """

    def __init__(self, num_ranks: int, timeout: float = 60.0) -> None:
        self.objects = LocalNetwork(num_ranks, timeout)
        self.device = DEVICE
        self.changed = threading.Condition()
        self.queues: dict[Edge, _Queue] = {}
        self._timeout = timeout
        self._broken: BrokenRuleError | None = None

    def transport(self, rank: int) -> OrderedTransport:
        """The transport of one rank."""
        return OrderedTransport(
            LocalTransport(self.objects, rank), StrictWire(self, rank), self.device
        )

    def wait_for(self, condition: Callable[[], bool], description: str) -> None:
        """Wait, but not for ever; a rule that was broken anywhere ends it."""
        deadline = time.monotonic() + self._timeout
        with self.changed:
            while not condition():
                if self._broken is not None:
                    raise self._broken
                if not self.changed.wait(deadline - time.monotonic()):
                    raise TransportError(f"{description} within {self._timeout:.0f} s")

    def match(self, queue: _Queue) -> None:
        """Deliver what can be delivered; the lock is held."""
        try:
            queue.match()
        except BrokenRuleError as error:
            self._broken = error
            raise
        finally:
            self.changed.notify_all()


class StrictWire(Wire):
    """One rank's end of all its edges."""

    def __init__(self, network: StrictNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank

    @override
    def open(self, edges: Sequence[Edge]) -> None:
        for edge in edges:
            if self._rank not in edge[:2]:
                continue
            with self._network.changed:
                queue = self._network.queues.setdefault(edge, _Queue(edge))
                assert self._rank not in queue.present, f"{edge} is opened twice"
                queue.present.add(self._rank)
                self._network.changed.notify_all()
            self._network.wait_for(
                lambda queue=queue: len(queue.present) == 2,  # type: ignore[misc]
                f"rank {self._rank} opened {edge}, and the other rank did not",
            )

    @override
    def begin(self, tensor: Tensor, source: int, target: int, channel: Channel) -> _StrictWork:
        end = "sent" if source == self._rank else "asked"
        if end == "asked":  # zeros might pass for a value
            tensor.fill_(float("nan") if tensor.is_floating_point() else tensor.dtype != torch.bool)
        return self._begin(end, tensor, Edge(source, target, lane_of(channel)), channel)

    @override
    def close(self) -> None:
        with self._network.changed:
            for queue in self._network.queues.values():
                queue.present.discard(self._rank)

    def _begin(self, end: str, tensor: Tensor, edge: Edge, channel: Channel) -> _StrictWork:
        self._check_wired(tensor, edge, channel)
        transfer = _Transfer(tensor, channel, _bits(tensor))
        with self._network.changed:
            queue = self._network.queues.get(edge)
            if queue is None or self._rank not in queue.present:
                raise BrokenRuleError(f"{channel.name} on {edge}, which was not opened: a deadlock")
            getattr(queue, end).append(transfer)
            self._network.match(queue)
        verb = "was not taken" if end == "sent" else "did not come"
        return _StrictWork(
            self._network, transfer, f"rank {self._rank}: {channel.name} on {edge} {verb}"
        )

    def _check_wired(self, tensor: Tensor, edge: Edge, channel: Channel) -> None:
        device = self._network.device
        if tensor.dtype not in WIRE_TYPES:
            raise BrokenRuleError(f"{channel.name} on {edge}: NCCL has no {tensor.dtype}")
        if tensor.device != device or not tensor.is_contiguous():
            raise BrokenRuleError(f"{channel.name} on {edge}: not contiguous on {device}")


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
