"""The same stages for this package and for ``torch.distributed.pipelining``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from benchmarks.emulated.sleeping import SleepingStage
from lightning_tspipe.simulation.cost import StageCost

SAMPLES, WIDTH, WINDOW = 256, 1024, 16
KINDS = ("linear", "sleeping")
"""Stages that compute, for as many processes as there are cores; or that sleep, for more."""
_LAYERS = 8
"""Of the whole network."""
_SECONDS = 0.24
"""What a forward of the whole network sleeps; a backward twice as long."""


class _Linear(nn.Module):
    """A product and a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Shape (samples, width), of input and output."""
        return torch.tanh(self.linear(x))


class _Whole(Function):
    """Passes a tensor through; its gradient lies in memory as it is sent."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


class _Sleeping(SleepingStage):
    """Passes on tensors that lie in memory as they are sent: torch's stages want them so."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Shape (samples, width), of input and output."""
        return super().forward(_Whole.apply(x)).contiguous()


def stages(kind: str, number: int) -> list[nn.Module]:
    """The stages of a network, all alike.

    Args:
        kind: One of :data:`KINDS`.
        number: How many; for ``linear``, a divisor of eight.
    """
    torch.manual_seed(0)
    if kind == "linear":
        layers = [_Linear() for _ in range(_LAYERS)]
        each = _LAYERS // number
        return [nn.Sequential(*layers[i * each : (i + 1) * each]) for i in range(number)]
    forward = _SECONDS / number
    cost = StageCost(forward, 2 * forward, forward, forward, output_bytes=4 * SAMPLES * 64)
    return [_Sleeping(cost, 1) for _ in range(number)]


def batches() -> list[Tensor]:
    """One window."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(WINDOW)]
