"""Modules that take the time of real ones, by sleeping, and pass on as many bytes.

One stage of a pipeline is one :class:`SleepingStage`. Its parts of the backward sleep where the
real ones would work, so that whole backwards and halves of them both run as they are::

    x ─► InputHalf ─────┐
                        ├─► Linear (sleeps in the forward) ─► output
    w ─► WeightHalf ────┘
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from lightning_tspipe.simulation.cost import StageCost

_FLOAT_BYTES = 4
_POLL_SECONDS = 5e-4


class Device:
    """The emulated device of this process: busy for as long as it is told."""

    def __init__(self) -> None:
        self._owed = 0.0

    def occupy(self, seconds: float) -> None:
        """Sleep; what the operating system slept too long is taken from the next sleep."""
        if seconds <= 0:
            return
        until = time.perf_counter() + seconds - self._owed
        left = until - time.perf_counter()
        if left > 0:
            time.sleep(left)
        # Only an oversleep, never what the caller does between two calls: that is measured.
        self._owed = min(time.perf_counter() - until, seconds)


DEVICE = Device()


class Passes:
    """Keeps the student's pass from beginning before the teacher's has ended.

    So it is where a library pipelines one call after the other: ``teacher(x)`` returns when all of
    its micro-batches are through. The last stage of the teacher writes a byte for each unit, the
    first one of the student reads how many there are.

    Args:
        file: Both processes know it.
        num_units: Units of a pass.
    """

    def __init__(self, file: Path, num_units: int) -> None:
        self._file = file
        self._num_units = num_units
        self._num_begun = 0
        file.touch()

    def ended(self) -> None:
        """A unit of the teacher is through."""
        with self._file.open("ab") as file:
            file.write(b".")

    def begin(self) -> None:
        """Wait until a unit of the student may begin."""
        wanted = (self._num_begun // self._num_units + 1) * self._num_units
        self._num_begun += 1
        while self._file.stat().st_size < wanted:
            time.sleep(_POLL_SECONDS)


class _Half(Function):
    """Passes a tensor through; sleeps when its gradient comes by."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        DEVICE.occupy(ctx.seconds)
        return gradients[0], None


class Linear(Function):
    """The forward of a stage. Named so that the backward is split here, as at a real product."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, width: int, seconds: float) -> Tensor:
        ctx.shapes = x.shape, weight.shape
        DEVICE.occupy(seconds)
        # One number behind all elements: only what is sent to another rank takes memory.
        return x.new_zeros(1, 1).expand(len(x), width)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.shapes
        zero = gradients[0].new_zeros(())
        return zero.expand(x), zero.expand(weight), None, None


class SleepingStage(nn.Module):
    """Takes the time of one stage.

    Args:
        cost: What a unit costs, without what the executor adds.
        num_weights: Length of the stand-in for its parameters.

    Attributes:
        waits: Before each forward, if it is the student's first stage.
        tells: After each forward, if it is the teacher's last stage.
    """

    def __init__(self, cost: StageCost, num_weights: int) -> None:
        super().__init__()
        self._cost = cost
        self.waits: Passes | None = None
        self.tells: Passes | None = None
        self.weight = nn.Parameter(torch.zeros(num_weights))
        # What has hooks is called as a whole, and not recorded: it sleeps whenever it is called.
        self.register_forward_pre_hook(_does_nothing)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Sleep.

        Args:
            x: Shape (samples of a unit, any width).

        Returns:
            Zeros, shape (samples, width), as many bytes as the stage passes on.
        """
        cost = self._cost
        width = max(1, round(cost.output_bytes / _FLOAT_BYTES / len(x)))
        # A first stage has no gradient to pass on, and its whole backward is the weights'.
        weights = cost.weight_backward if x.requires_grad else cost.backward
        # Whoever only asks for shapes gets them at once.
        is_real = type(x) is Tensor and x.device.type == "cpu"
        if is_real and self.waits is not None:
            self.waits.begin()
        x = _Half.apply(x, cost.input_backward)
        weight = _Half.apply(self.weight, weights)
        y = Linear.apply(x, weight, width, cost.forward if is_real else 0.0)
        if is_real and self.tells is not None:
            self.tells.ended()
        return y  # type: ignore[no-any-return]


def _does_nothing(_module: nn.Module, _given: object) -> None:
    pass
