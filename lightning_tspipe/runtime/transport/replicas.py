"""Replicas of a pipeline: who is whose counterpart, and the groups in which they talk.

Ranks are numbered pipeline by pipeline. The ranks of a column, which have the same place in each
pipeline and so hold the same stages, are *peers*::

                 rank 0 (loss)   rank 1   rank 2 (data)
    replica 0         0            1           2          global ranks
    replica 1         3            4           5
                    peers        peers       peers

Gradients, metrics and whatever a user's step does with ``torch.distributed`` stay among peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember, ReduceOp


class Replicas:
    """The replicas, as one rank sees them.

    Args:
        index: This rank's replica.
        number: Number of replicas.
        peers: The group of this rank's peers, by replica; None where no processes are connected.
    """

    def __init__(self, index: int = 0, number: int = 1, peers: Any = None) -> None:
        self.index = index
        self.number = number
        self.peers = peers

    @property
    def is_first(self) -> bool:
        """Whether this is the replica that plans, logs and saves."""
        return self.index == 0

    def broadcast(self, value: Any) -> Any:
        """The first replica's value, on all peers."""
        if self.number == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.peers, group_src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all peers, on each of them."""
        if self.number == 1:
            return [value]
        values: list[Any] = [None] * self.number
        dist.all_gather_object(values, value, group=self.peers)
        return values

    def all_say(self, yes: bool) -> bool:
        """Whether all peers say yes."""
        if self.number == 1:
            return yes
        return bool(reduce_among(torch.tensor(int(yes)), self.peers, "min"))

    @contextmanager
    def as_world(self) -> Iterator[None]:
        """While inside, the peers are all there is, for users of ``torch.distributed``.

        A loss that gathers (or a metric, or a centre that is averaged) asks the default group. On a
        rank of a pipeline that would include ranks that never run a loss, and would wait for ever.
        """
        if self.peers is None:
            yield
            return
        with default_group(self.peers):
            yield


@contextmanager
def default_group(group: Any) -> Iterator[None]:
    """While inside, ``torch.distributed`` takes ``group`` for the whole world.

    Ranks, also those of groups that are made inside, are then places in ``group``. Groups that
    exist already can still be used; they are addressed by places in themselves (``group_dst``).
    """
    previous = GroupMember.WORLD
    GroupMember.WORLD = group
    try:
        yield
    finally:
        GroupMember.WORLD = previous


def make_groups(
    num_ranks: int, num_replicas: int, backend: str, timeout: timedelta, device: torch.device
) -> tuple[Any, Any]:
    """The group of this rank's pipeline and that of its peers; all ranks of the job call it.

    Args:
        num_ranks: Ranks of a pipeline.
        num_replicas: Pipelines.
        backend: Backend among peers; a pipeline's group is for objects on the host.
        timeout: How long a collective waits for a live peer.
        device: This rank's.
    """
    # NCCL would take the one whose number is this process's on the machine.
    bound = device if "nccl" in backend else None
    replica, place = divmod(dist.get_rank(), num_ranks)
    first = range(0, num_ranks * num_replicas, num_ranks)
    pipelines = [
        dist.new_group(list(range(start, start + num_ranks)), timeout=timeout, backend="gloo")
        for start in first
    ]
    peers = [
        dist.new_group(
            [start + rank for start in first], timeout=timeout, backend=backend, device_id=bound
        )
        for rank in range(num_ranks)
    ]
    return pipelines[replica], peers[place]


def reduce_among(tensor: Tensor, group: Any, operation: Any = "mean") -> Tensor:
    """Reduce a tensor in place over the ranks of a group.

    Args:
        tensor: The tensor, of the same shape on all ranks.
        group: The ranks.
        operation: ``mean``, ``sum``, ``max``, ``min`` or another of ``ReduceOp``, or one itself.
    """
    name = operation.lower() if isinstance(operation, str) else ""
    # gloo knows no mean.
    is_mean = name in {"mean", "avg"} or operation == ReduceOp.AVG
    if is_mean:
        operation = ReduceOp.SUM
    elif name:
        operation = getattr(ReduceOp, name.upper())
    dist.all_reduce(tensor, op=operation, group=group)
    if is_mean:
        tensor.copy_(tensor / dist.get_world_size(group))
    return tensor


def gather_among(tensor: Tensor, group: Any, *, with_gradients: bool = False) -> Tensor:
    """The tensors of all ranks of a group, stacked along a new first dimension.

    Args:
        tensor: The tensor, of the same shape on all ranks.
        group: The ranks.
        with_gradients: Whether gradients go back to the rank that a part came from; then all ranks
            must run the backward. Each gets the sum of what all ranks ask for.
    """
    if with_gradients:
        gathered: Tensor = _Gather.apply(tensor, group)
        return gathered
    with torch.no_grad():
        return _gather(tensor, group)


def _gather(tensor: Tensor, group: Any) -> Tensor:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)


class _Gather(torch.autograd.Function):
    """torch.distributed.nn's knows the whole world only."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None
