"""Ranks with a GPU each: tensors travel by NCCL, one communicator for each edge in use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember
from typing_extensions import override

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.transport.channels import Channel, Edge, lane_of
from lightning_tspipe.runtime.transport.ordered import Wire, Work
from lightning_tspipe.runtime.transport.replicas import default_group


class NcclWire(Wire):
    """One communicator for each lane of each edge that this rank uses; no other rank takes part.

    A rank of a chain has four: to and from each of two neighbours.

    Args:
        ranks: The global ranks of the pipeline, in its order.
        device: This rank's GPU.
        timeout: How long a transfer may take before NCCL's watchdog ends it.
        backend: Of ``torch.distributed``.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device,
        timeout: timedelta,
        backend: str = "nccl",
    ) -> None:
        self._pipeline = GroupMember.WORLD  # groups are made of it, and under its keys
        self._ranks = tuple(ranks)
        self._rank = self._ranks.index(dist.get_rank())
        self._device = device
        self._timeout = timeout
        self._backend = backend
        self._groups: dict[Edge, Any] = {}

    @property
    def num_communicators(self) -> int:
        """Communicators that this rank takes part in."""
        return len(self._groups)

    @override
    def open(self, edges: Sequence[Edge]) -> None:
        with default_group(self._pipeline):
            for edge in edges:
                # All ranks: torch names a group by how many a rank has made, also where it asks
                # for the group's own ranks only (use_local_synchronization).
                group = self._make(edge)
                if self._rank in edge[:2]:
                    self._greet(group, edge)
                    self._groups[edge] = group

    def _make(self, edge: Edge) -> Any:
        return dist.new_group(
            sorted((self._ranks[edge.source], self._ranks[edge.target])),
            timeout=self._timeout,
            backend=self._backend,
            group_desc=f"tspipe {edge.source}>{edge.target} {edge.lane.name.lower()}",
            device_id=self._device if self._device.type == "cuda" else None,
        )

    def _greet(self, group: Any, edge: Edge) -> None:
        """The first message, which connects the two."""
        hello = torch.zeros(1, dtype=torch.uint8, device=self._device)
        if edge.source == self._rank:
            _begun(
                dist.isend(hello, group=group, group_dst=_place(edge.target, edge.source))
            ).wait()
        else:
            _begun(
                dist.irecv(hello, group=group, group_src=_place(edge.source, edge.target))
            ).wait()

    @override
    def isend(self, tensor: Tensor, target: int, channel: Channel) -> Work:
        group = self._group(self._rank, target, channel)
        return _begun(dist.isend(tensor, group=group, group_dst=_place(target, self._rank)))

    @override
    def irecv(self, tensor: Tensor, source: int, channel: Channel) -> Work:
        group = self._group(source, self._rank, channel)
        return _begun(dist.irecv(tensor, group=group, group_src=_place(source, self._rank)))

    def _group(self, source: int, target: int, channel: Channel) -> Any:
        edge = Edge(source, target, lane_of(channel))
        group = self._groups.get(edge)
        if group is None:
            raise TransportError(
                f"{channel.name} from rank {source} to rank {target}: this edge was not opened "
                "when the stages were placed. Please report it, with the step and the strategy"
            )
        return group

    @override
    def close(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            # A peer that has failed would be waited for otherwise.
            with suppress(RuntimeError):
                group.abort()
            with suppress(RuntimeError), default_group(self._pipeline):
                dist.destroy_process_group(group)


def _place(rank: int, other: int) -> int:
    """A rank's place in the group of the two."""
    return int(rank > other)


def _begun(work: Work | None) -> Work:
    assert work is not None, "this rank is no member of the edge's group"
    return work
