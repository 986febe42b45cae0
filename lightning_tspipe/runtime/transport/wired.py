"""Transports over wires, which post transfers and wait for them later: gloo's, NCCL's.

NCCL's rules are the strictest: one queue per directed edge, no tags, and order is everything. An
edge connects at its first use, which holds the host until the peer comes: two ranks that each begin
with a receive would wait for each other for ever. So edges are opened before, one after the other,
in one order on all ranks. ::

    rank 0   open 0>1    open 1>0    |  receive (1>0) ... the host goes on
    rank 1   open 0>1    open 1>0    |  receive (0>1) ... the host goes on

Headers and other objects are for the host, and travel on a transport beside it.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember
from typing_extensions import override

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.runtime.transport.base import Receipt, Specs, Transport, as_sent, failure
from lightning_tspipe.runtime.transport.channels import Channel, Edge, connected, lane_of
from lightning_tspipe.runtime.transport.replicas import default_group

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
    """Carries tensors, by NCCL's rules.

    Tensors of one lane of an edge are received in the order in which they were sent, and only what
    was asked for in that order arrives.
    """

    @abstractmethod
    def open(self, edges: Sequence[Edge]) -> None:
        """Connect edges, the same on all ranks and in this order; holds the host for its peers.

        A rank that an edge doesn't concern takes note of it, no more.
        """

    @abstractmethod
    def begin(self, tensor: Tensor, source: int, target: int, channel: Channel) -> Work:
        """Begin to send a tensor, or to receive into it, on the rank that is one of the two.

        It is contiguous, and of one of ``WIRE_TYPES``.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all edges back; what is under way is lost."""


Begin = Callable[[Tensor, int, int, Channel], Work]

_EARLY = {Channel.MORE, Channel.ORDERS}
"""Objects that may be heard many steps behind the one that sends them: no step waits for them."""

_MOST_EARLY = 1000
"""More than there ever are of them on their way to a rank."""


class WiredTransport(Transport):
    """Tensors on something that posts transfers.

    What was sent is kept until it has left: a dropped handle would lose the message, a changed
    tensor would spoil it.

    Args:
        begin: Begins to send a tensor, or to receive into it, see :meth:`Wire.begin`.
        rank: This rank's place in the pipeline.
        num_ranks: Ranks in the pipeline.
        device: Where received tensors should be.
        through_host: Whether only tensors of the host can be sent: those of a GPU pass through
            pinned memory.
    """

    def __init__(
        self, begin: Begin, rank: int, num_ranks: int, device: torch.device, *, through_host: bool
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._begin = begin
        self._device = device
        self._through_host = through_host and device.type == "cuda"
        self._now: list[tuple[Work, Tensor]] = []
        self._in_training: deque[list[tuple[Work, Tensor]]] = deque()
        self._in_evaluation: list[tuple[Work, Tensor]] = []
        self._early: defaultdict[int, deque[tuple[Work, Tensor]]] = defaultdict(deque)
        """For each rank, what it hears steps later, however many."""

    @override
    def send(
        self, tensors: Sequence[Tensor], target: int, channel: Channel, specs: Specs | None = None
    ) -> None:
        for tensor in as_sent(tensors, specs):
            payload = _as_wired(self._departing(tensor.contiguous()))
            if payload.numel():  # otherwise the receiver knows its shape
                with self._reaching("send to", target):
                    work = self._begin(payload, self.rank, target, channel)
                early = self._early[target]
                (early if channel in _EARLY else self._now).append((work, payload))
                if len(early) > _MOST_EARLY:
                    early.popleft()[0].wait()

    def _departing(self, tensor: Tensor) -> Tensor:
        if not self._through_host or tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return host

    @override
    def receive(self, specs: Specs, source: int, channel: Channel) -> Receipt:
        device, pinned = ("cpu", True) if self._through_host else (self._device, False)
        buffers = [
            torch.empty(spec.memory_shape, dtype=spec.dtype, device=device, pin_memory=pinned)
            for spec in specs
        ]
        with self._reaching("receive from", source):
            works = [
                self._begin(_as_wired(buffer), source, self.rank, channel)
                for buffer in buffers
                if buffer.numel()
            ]
        tensors = [spec.from_memory(buffer) for spec, buffer in zip(specs, buffers, strict=True)]
        return Receipt(partial(self._await, tensors, works, source))

    def _await(self, tensors: list[Tensor], works: list[Work], source: int) -> list[Tensor]:
        with self._reaching("receive from", source):
            for work in works:
                work.wait()
        if self._through_host:
            tensors = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            torch.cuda.current_stream().synchronize()
        return tensors

    @override
    def finish_step(self, *, in_training: bool = True) -> None:
        """Wait for what was sent so many steps ago, or before; in evaluations, one step ago.

        It has been consumed by now, or its consumer is behind: then this rank waits for it, so that
        it can't run ahead without bounds.
        """
        due = self._in_evaluation
        self._in_evaluation = []
        if in_training:
            while len(self._in_training) >= self.steps_under_way:
                due += self._in_training.popleft()
            self._in_training.append(self._now)
        else:
            self._in_evaluation = self._now
        self._now = []
        with self._reaching("send to", None):
            for work, _ in due:
                work.wait()

    @contextmanager
    def _reaching(self, verb: str, peer: int | None) -> Iterator[None]:
        """What fails inside fails since a peer did."""
        try:
            yield
        except RuntimeError as error:
            raise failure(self.rank, verb, peer, first_line(error)) from error


class GlooTransport(WiredTransport):
    """Ranks are the processes of the default group; messages are matched by tags.

    CPU tensors travel directly, CUDA tensors through pinned memory.

    Args:
        device: Where received tensors should be.
        timeout: How long a receive waits for a message of a live peer.
    """

    is_tight = True

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(list(range(num_ranks)), timeout=timeout, backend="gloo")
        super().__init__(partial(_begin, group), rank, num_ranks, device, through_host=True)

    @override
    def send_object(self, value: Any, target: int, channel: Channel = Channel.CONTROL) -> None:
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.send([torch.tensor(payload.shape), payload], target, channel)

    @override
    def receive_object(self, source: int, channel: Channel = Channel.CONTROL) -> Any:
        length = torch.empty(1, dtype=torch.int64)
        self._receive_into(length, source, channel)
        payload = torch.empty(int(length), dtype=torch.uint8)
        self._receive_into(payload, source, channel)
        return pickle.loads(payload.numpy().tobytes())  # noqa: S301 - a rank of this job wrote it

    def _receive_into(self, buffer: Tensor, source: int, channel: Channel) -> None:
        with self._reaching("receive from", source):
            self._begin(buffer, source, self.rank, channel).wait()


class OrderedTransport(WiredTransport):
    """Tensors on a wire that knows no tags, objects on a transport beside it.

    No rank has more than ``MAX_COMMUNICATORS`` edges on the wire: further ones are the other
    transport's too.

    Args:
        beside: Carries objects, and tensors through the host's memory.
        wire: Carries tensors.
        device: Where tensors are.
    """

    def __init__(self, beside: Transport, wire: Wire, device: torch.device) -> None:
        super().__init__(wire.begin, beside.rank, beside.num_ranks, device, through_host=False)
        self._beside = beside
        self._wire = wire
        self._on_wire: set[Edge] = set()
        self._on_host: set[Edge] = set()
        self._ends: deque[torch.cuda.Event] = deque()

    @override
    def open(self, edges: Iterable[Edge]) -> None:
        new = set(edges) - self._on_wire - self._on_host
        found = connected(new, self._on_wire)
        with self._reaching("connect to", None):
            self._wire.open(sorted(found))
        self._on_wire |= found
        self._on_host |= new - found

    @override
    def send(
        self, tensors: Sequence[Tensor], target: int, channel: Channel, specs: Specs | None = None
    ) -> None:
        if Edge(self.rank, target, lane_of(channel)) in self._on_host:
            self._beside.send(tensors, target, channel, specs)
        else:
            super().send(tensors, target, channel, specs)

    @override
    def receive(self, specs: Specs, source: int, channel: Channel) -> Receipt:
        if Edge(source, self.rank, lane_of(channel)) in self._on_host:
            return self._beside.receive(specs, source, channel)
        return super().receive(specs, source, channel)

    @override
    def finish_step(self, *, in_training: bool = True) -> None:
        self._beside.steps_under_way = self.steps_under_way
        self._beside.finish_step(in_training=in_training)
        super().finish_step(in_training=in_training)
        if self._device.type == "cuda":
            # Nothing else holds a host that only launches: it would run ahead without bounds.
            end = torch.cuda.Event()
            end.record()
            self._ends.append(end)
            if len(self._ends) > self.steps_under_way:
                self._ends.popleft().synchronize()

    @override
    def send_object(self, value: Any, target: int, channel: Channel = Channel.CONTROL) -> None:
        self._beside.send_object(value, target, channel)

    @override
    def receive_object(self, source: int, channel: Channel = Channel.CONTROL) -> Any:
        return self._beside.receive_object(source, channel)

    @override
    def close(self) -> None:
        self._beside.close()
        self._wire.close()
        self._on_wire.clear()
        self._on_host.clear()


class NcclWire(Wire):
    """One communicator for each lane of each edge that this rank uses; no other rank takes part.

    A rank of a chain has four, to and from each of two neighbours, and at most two for fields.

    Args:
        device: This rank's GPU.
        timeout: How long a transfer may take before NCCL's watchdog ends it.
        backend: Of ``torch.distributed``.
    """

    def __init__(self, device: torch.device, timeout: timedelta, backend: str = "nccl") -> None:
        self._pipeline = GroupMember.WORLD  # groups are made of it, and under its keys
        self._rank = dist.get_rank()
        self._device = device
        self._timeout = timeout
        self._backend = backend
        self._groups: dict[Edge, Any] = {}

    @override
    def open(self, edges: Sequence[Edge]) -> None:
        with default_group(self._pipeline):
            for edge in edges:
                # All ranks: torch names a group by how many a rank has made, also where it asks
                # for the group's own ranks only (use_local_synchronization).
                group = dist.new_group(
                    sorted(edge[:2]),
                    timeout=self._timeout,
                    backend=self._backend,
                    group_desc=f"tspipe {edge.source}>{edge.target} {edge.lane.name.lower()}",
                    device_id=self._device if self._device.type == "cuda" else None,
                )
                if self._rank in edge[:2]:
                    self._groups[edge] = group
                    # The first message connects the two.
                    self._begin(torch.zeros(1, dtype=torch.uint8, device=self._device), edge).wait()

    @override
    def begin(self, tensor: Tensor, source: int, target: int, channel: Channel) -> Work:
        return self._begin(tensor, Edge(source, target, lane_of(channel)))

    def _begin(self, tensor: Tensor, edge: Edge) -> Work:
        source, target, lane = edge
        if edge not in self._groups:
            raise TransportError(
                f"{lane.name} from rank {source} to rank {target}: this edge was not opened "
                "when the stages were placed. Please report it, with the step and the strategy"
            )
        # In its group, the later of the two ranks is number 1.
        return _begin(self._groups[edge], tensor, int(source > target), int(target > source))

    @override
    def close(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            # A peer that has failed would be waited for otherwise.
            with suppress(RuntimeError):
                group.abort()
            with suppress(RuntimeError), default_group(self._pipeline):
                dist.destroy_process_group(group)


def _begin(group: Any, tensor: Tensor, source: int, target: int, tag: int = 0) -> Work:
    """Begin the transfer between two places in a group, of which this rank has one."""
    if group.rank() == source:
        work = dist.isend(tensor, group=group, group_dst=target, tag=tag)
    else:
        work = dist.irecv(tensor, group=group, group_src=source, tag=tag)
    assert work is not None, "this rank is no member of the group"
    return work


def _as_wired(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, in a type that the wire has."""
    return tensor if tensor.dtype in WIRE_TYPES else tensor.reshape(-1).view(torch.uint8)
