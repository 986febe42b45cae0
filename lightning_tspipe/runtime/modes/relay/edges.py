"""What ranks of a relay exchange: activations from stage to stage, sums within a stage.

What is relayed from one rank to another comes step after step, into two buffers in turn. A receiver
asks for the next step's activations as soon as it has those of this one, so that they
travel while it computes. Their shape is not known then: they are asked for in that of before. Where
this turns out wrong (the last batch of an epoch), the sender first sends a *filler* of the old
shape, which nobody reads; both ranks know the shapes, and so know of it. ::

    receiver   ask 8 │ take │ ask 8 │ take │ ask 8 │ drop │ ask 3 │ take
    sender          8 ───┘      8 ─────┘   filler ─────┘  3 ────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import Channel


@dataclass
class _End:
    """One end of an edge.

    Attributes:
        transport: How to reach the other end.
        peer: The other end's rank.
        early: Whether the receiver asks before the shape is known.
    """

    transport: Transport
    peer: int
    early: bool = field(kw_only=True)


@dataclass
class Inbox(_End):
    """The receiving end."""

    _asked: list[tuple[TensorSpec, Receipt]] = field(default_factory=list, init=False)
    """What is under way; fillers, if something of another kind was asked for behind them."""

    def ask(self, spec: TensorSpec) -> None:
        """The next message is of this kind."""
        if not self._asked or self._asked[-1][0] != spec:
            self._asked.append((spec, self.transport.receive([spec], self.peer, Channel.RELAY)))

    def take(self) -> Tensor:
        """What was asked for, as soon as it is here.

        Raises:
            TransportError: The sender ended or stalled.
        """
        spec, receipt = self._asked.pop()
        self.settle()
        (tensor,) = receipt.wait()
        if self.early:
            self.ask(spec)
        return tensor

    def settle(self) -> None:
        """Nothing else was sent, for now: what is under way are fillers, which nobody reads."""
        asked, self._asked = self._asked, []
        for _, filler in asked:
            filler.wait()


@dataclass
class Outbox(_End):
    """The sending end."""

    _expected: TensorSpec | None = field(default=None, init=False)
    _device: torch.device = field(default=torch.device("cpu"), init=False)

    def send(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Send the next message; returns at once.

        Args:
            tensor: The message.
            spec: What the inbox asks for.
        """
        self._device = tensor.device
        if spec != self._expected:
            self.settle()
        self.transport.send([tensor], self.peer, Channel.RELAY, [spec])
        self._expected = spec if self.early else None

    def settle(self) -> None:
        """Send a filler, if the receiver has asked already."""
        spec, self._expected = self._expected, None
        if spec is not None:
            filler = torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
            self.transport.send([filler], self.peer, Channel.RELAY, [spec])


class StageGroup:
    """The ranks of one stage, as one of them sees it: they exchange tensors and sum gradients.

    They form a ring, as of an all-gather: each sends its own to the next rank, and what it receives
    too. All add up in one order: so all get the same bits, and a stage stays the same on all its
    ranks.

    Args:
        transport: How to reach them.
        ranks: All of them, in the order of their shares.

    Attributes:
        width: Ranks in the group.
        unit: This rank's share.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport = transport
        self._ranks = tuple(ranks)
        self.width, self.unit = len(ranks), self._ranks.index(transport.rank)

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, of one shape, in the order of the shares.

        Raises:
            TransportError: A rank of the group ended or stalled.
        """
        part = tensor.detach().clone()
        parts, specs = {self.unit: part}, [TensorSpec.of(part)]
        before, after = (self._ranks[(self.unit + i) % self.width] for i in (-1, 1))
        for hop in range(1, self.width):
            receipt = self._transport.receive(specs, before, Channel.SHARED)
            self._transport.send([part], after, Channel.SHARED, specs)
            with waiting("the other ranks of a shared stage"):
                (part,) = receipt.wait()
            parts[(self.unit - hop) % self.width] = part
        return [parts[unit] for unit in range(self.width)]

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
            parts = self.exchange(flat)
            total = reduce(torch.add, parts)
            for p, summed in zip(same, total.split([p.numel() for p in same]), strict=True):
                is_kept = everywhere or self.unit == 0
                p.grad = summed.view_as(p).clone() if is_kept else None
