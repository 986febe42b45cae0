"""The ranks that share a stage: they exchange small tensors and sum their gradients.

Each sends its own to all others, and adds up in one order: so all get the same bits, and a stage
stays the same on all its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Channel


class StageGroup:
    """The ranks of one stage, as one of them sees it.

    Args:
        transport: How to reach them.
        ranks: All of them, in the order of their shares.

    Attributes:
        bytes_sent: Of gradients and statistics, so far.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport = transport
        self._ranks = tuple(ranks)
        self.bytes_sent = 0

    @property
    def width(self) -> int:
        """Ranks in the group."""
        return len(self._ranks)

    @property
    def unit(self) -> int:
        """This rank's share."""
        return self._ranks.index(self._transport.rank)

    def exchange(
        self, tensor: Tensor, channel: Channel = Channel.SHARED_STATISTICS
    ) -> list[Tensor]:
        """Everybody's tensor, of one shape, in the order of the shares.

        Raises:
            TransportError: A rank of the group ended or stalled.
        """
        own, me = tensor.detach().clone(), self._transport.rank
        spec = TensorSpec.of(own)
        others = [rank for rank in self._ranks if rank != me]
        receipts = {rank: self._transport.receive([spec], rank, channel) for rank in others}
        for rank in others:
            self._transport.send([own], rank, channel, [spec])
            self.bytes_sent += own.nbytes
        with waiting("the other ranks of a shared stage"):
            return [own if rank == me else receipts[rank].wait()[0] for rank in self._ranks]

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[nn.Parameter], *, everywhere: bool = True) -> None:
        """Give every parameter the sum of the ranks' gradients; none counts as zero.

        Args:
            parameters: The parameters, the same on all ranks.
            everywhere: Whether all ranks get the sums, or the first one only, and the others none.

        Raises:
            TransportError: A rank of the group ended or stalled.
        """
        trained = [p for p in parameters if p.requires_grad]
        for kind in sorted({p.dtype for p in trained}, key=str):
            same = [p for p in trained if p.dtype == kind]
            flat = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in same]
            )
            parts = self.exchange(flat, Channel.SHARED_GRADIENTS)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            start = 0
            for p in same:
                summed = total[start : start + p.numel()].view_as(p)
                start += p.numel()
                if not everywhere and self.unit > 0:
                    p.grad = None
                else:
                    p.grad = summed.clone() if p.grad is None else p.grad.copy_(summed)
