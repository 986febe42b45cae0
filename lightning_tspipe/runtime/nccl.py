"""Ranks with a GPU each: tensors travel by NCCL, objects by gloo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.channels import Channel
from lightning_tspipe.runtime.transport import GlooTransport, Receipt


class NcclTransport(GlooTransport):
    """One communicator per directed edge, since NCCL knows no tags: order is everything.

    On an edge, messages are received in the order in which they are sent; the receiver posts them
    in that order because a program lists them so. What travels beside a program (the fields of a
    batch) has communicators of its own.

    Args:
        ranks: The global ranks of the pipeline, in its order.
        device: This rank's GPU.
        timeout: How long a receive waits for a message of a live peer.
        aside: Channels that travel beside the program.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device,
        timeout: timedelta,
        aside: frozenset[Channel] = frozenset(),
    ) -> None:
        super().__init__(ranks, device, timeout)
        self._aside = aside
        self.receives_early = False
        # Every rank makes all groups in the same order; a communicator starts at its first use.
        self._edges: dict[tuple[int, int, int], Any] = {
            (source, target, beside): dist.new_group(
                sorted((ranks[source], ranks[target])), timeout=timeout, backend="nccl"
            )
            for source in range(len(ranks))
            for target in range(len(ranks))
            if source != target
            for beside in (0, *sorted(aside))
        }
        self._ranks = tuple(ranks)

    def _beside(self, channel: Channel) -> int:
        return channel if channel in self._aside else 0

    @override
    def send(self, tensors: Sequence[Tensor], target: int, channel: Channel) -> None:
        group = self._edges[self.rank, target, self._beside(channel)]
        for tensor in tensors:
            payload = tensor.detach().contiguous()
            work = dist.isend(payload, dst=self._ranks[target], group=group)
            self._sent.append((work, payload))

    @override
    def receive(self, specs: Sequence[TensorSpec], source: int, channel: Channel) -> Receipt:
        group = self._edges[source, self.rank, self._beside(channel)]
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        works = [dist.irecv(buffer, src=self._ranks[source], group=group) for buffer in buffers]
        return _NcclReceipt(buffers, works)

    @override
    def recycle(self, tensors: Sequence[Tensor]) -> None:
        """CUDA's caching allocator does this better."""


@dataclass
class _NcclReceipt(Receipt):
    buffers: list[Tensor]
    works: list[Any]

    @override
    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()  # the current stream waits, not the host
        return self.buffers
