"""A network whose atoms sleep for as long as their floating-point operations would take."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_tspipe.planning.profile import AtomProfile
from lightning_tspipe.planning.step_profile import StepProfile

_FLOAT_BYTES = 4


class _Sleep(Function):
    """Sleeps forth and back; passes on numbers that are all zero."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, width: int, seconds: Any) -> Tensor:
        ctx.shapes, ctx.seconds = (x.shape, weight.shape), seconds[1]
        if type(x) is Tensor:  # whoever asks for shapes gets them at once
            time.sleep(seconds[0] * len(x))
        return x.new_zeros(1, 1).expand(len(x), width)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.shapes
        time.sleep(ctx.seconds * x[0])
        zero = gradients[0].new_zeros(())
        return zero.expand(x), zero.expand(weight), None, None


class Sleeper(nn.Module):
    """One atom.

    Args:
        atom: Its costs: seconds of one sample, and bytes that it passes on.
    """

    def __init__(self, atom: AtomProfile) -> None:
        super().__init__()
        self._seconds = atom.forward[1], atom.backward[1]
        self._width = max(1, round(atom.output_bytes_per_sample / _FLOAT_BYTES))
        self.weight = nn.Parameter(torch.zeros(1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Sleep; shape (samples, any width) to (samples, own width)."""
        return _Sleep.apply(x, self.weight, self._width, self._seconds)  # type: ignore[no-any-return]


class Sleeping(LightningModule):
    """A classifier that sleeps.

    Args:
        profile: Its costs.
    """

    def __init__(self, profile: StepProfile) -> None:
        super().__init__()
        self.student = nn.Sequential(*map(Sleeper, profile.student.atoms))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.student(batch[0]).mean()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.01)
