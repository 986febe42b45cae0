"""Tensors by NCCL's rules: one queue per directed edge, no tags, and order is everything.

An edge connects at its first use, which holds the host until the peer comes: two ranks that each
begin with a receive would wait for each other for ever. So edges are opened before, one after the
other, in one order on all ranks. ::

    rank 0   open 0>1    open 1>0    |  receive (1>0) ... the host goes on
    rank 1   open 0>1    open 1>0    |  receive (0>1) ... the host goes on

Headers and other objects are for the host, and travel on a transport beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.transport.base import (
    Outgoing,
    Receipt,
    Transport,
    as_they_travel,
    failure,
)
from lightning_tspipe.runtime.transport.channels import Channel, Edge

WIRE_TYPES = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip
"""What NCCL has names for; everything else travels as bytes."""


class Work(Protocol):
    """A transfer that was begun."""

    def wait(self) -> Any:
        """Let the device go on when it is done; the host may go on at once."""


class Wire(ABC):
    """Carries tensors by NCCL's rules.

    Tensors of one lane of an edge are received in the order in which they were sent, and only what
    was asked for in that order arrives.
    """

    @abstractmethod
    def open(self, edges: Sequence[Edge]) -> None:
        """Connect edges, the same on all ranks and in this order; holds the host for its peers.

        A rank that an edge doesn't concern takes note of it, no more.
        """

    @abstractmethod
    def isend(self, tensor: Tensor, target: int, channel: Channel) -> Work:
        """Begin to send a contiguous tensor of one of ``WIRE_TYPES``."""

    @abstractmethod
    def irecv(self, tensor: Tensor, source: int, channel: Channel) -> Work:
        """Begin to receive into such a tensor."""

    @abstractmethod
    def close(self) -> None:
        """Give all edges back; what is under way is lost."""


class OrderedTransport(Transport):
    """Tensors on a wire that knows no tags, objects on a transport beside it.

    Args:
        objects: Carries objects.
        wire: Carries tensors.
        device: Where tensors are.
    """

    receives_early = False

    def __init__(self, objects: Transport, wire: Wire, device: torch.device) -> None:
        self.rank = objects.rank
        self.num_ranks = objects.num_ranks
        self._objects = objects
        self._wire = wire
        self._device = device
        self._open: set[Edge] = set()
        self._outgoing = Outgoing()
        self._ends: deque[torch.cuda.Event] = deque()

    @override
    def open(self, edges: Iterable[Edge]) -> None:
        new = sorted(set(edges) - self._open)
        try:
            self._wire.open(new)
        except RuntimeError as error:
            raise failure(self.rank, "connect to", None, error) from error
        self._open.update(new)

    @override
    def send(
        self,
        tensors: Sequence[Tensor],
        target: int,
        channel: Channel,
        specs: Sequence[TensorSpec] | None = None,
    ) -> None:
        for tensor in as_they_travel(tensors, specs):
            if not tensor.numel():
                continue  # the receiver knows its shape
            payload = _as_wired(tensor)
            try:
                work = self._wire.isend(payload, target, channel)
            except RuntimeError as error:
                raise failure(self.rank, "send to", target, error) from error
            self._outgoing.add(work, payload)

    @override
    def receive(self, specs: Sequence[TensorSpec], source: int, channel: Channel) -> Receipt:
        buffers = [
            torch.empty(spec.memory_shape, dtype=spec.dtype, device=self._device) for spec in specs
        ]
        try:
            works = [
                self._wire.irecv(_as_wired(buffer), source, channel)
                for buffer in buffers
                if buffer.numel()
            ]
        except RuntimeError as error:
            raise failure(self.rank, "receive from", source, error) from error
        tensors = [spec.from_memory(buffer) for spec, buffer in zip(specs, buffers, strict=True)]
        return _OrderedReceipt(tensors, works, self.rank, source)

    @override
    def finish_step(self, *, in_training: bool = True) -> None:
        self._objects.steps_under_way = self.steps_under_way
        self._objects.finish_step(in_training=in_training)
        self._outgoing.finish_step(self.steps_under_way, self._wait, in_training=in_training)
        if self._device.type == "cuda":
            # Nothing else holds a host that only launches: it would run ahead without bounds.
            end = torch.cuda.Event()
            end.record()
            self._ends.append(end)
            if len(self._ends) > self.steps_under_way:
                self._ends.popleft().synchronize()

    def _wait(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise failure(self.rank, "send to", None, error) from error

    @override
    def send_object(self, value: Any, target: int, channel: Channel = Channel.CONTROL) -> None:
        self._objects.send_object(value, target, channel)

    @override
    def receive_object(self, source: int, channel: Channel = Channel.CONTROL) -> Any:
        return self._objects.receive_object(source, channel)

    @override
    def close(self) -> None:
        self._objects.close()
        self._wire.close()
        self._open.clear()


@dataclass
class _OrderedReceipt(Receipt):
    tensors: list[Tensor]
    works: list[Work]
    rank: int
    source: int

    @override
    def wait(self) -> list[Tensor]:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise failure(self.rank, "receive from", self.source, error) from error
        return self.tensors


def _as_wired(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, in a type that the wire has."""
    return tensor if tensor.dtype in WIRE_TYPES else tensor.reshape(-1).view(torch.uint8)
