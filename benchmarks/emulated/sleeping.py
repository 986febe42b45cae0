"""Modules that take the time of real ones, by sleeping, and pass on as many bytes.

One atom of a network is one :class:`SleepingAtom`. Its parts of the backward sleep where the real
ones would work, so that whole backwards and halves of them both run as they are::

    x ─► InputHalf ─────┐
                        ├─► Linear (sleeps in the forward) ─► output
    w ─► WeightHalf ────┘
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from lightning_tspipe.planning.profile import AtomProfile, seconds_at

_FLOAT_BYTES = 4


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
    """The forward of an atom. Named so that the backward is split here, as at a real product."""

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


class SleepingAtom(nn.Module):
    """Takes the time of one atom.

    Args:
        profile: What the atom costs.
        num_weights: Length of the stand-in for its parameters.
    """

    def __init__(self, profile: AtomProfile, num_weights: int = 1) -> None:
        super().__init__()
        self._profile = profile
        self._width = max(1, round(profile.output_bytes_per_sample / _FLOAT_BYTES))
        is_trained = bool(profile.trainable_bytes)
        self.weight = nn.Parameter(torch.zeros(num_weights), requires_grad=is_trained)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Sleep.

        Args:
            x: Shape (batch, any width).

        Returns:
            Zeros, shape (batch, width of this atom).
        """
        forward, inputs, weights = (
            seconds_at(times, len(x))
            for times in (
                self._profile.forward,
                self._profile.input_backward,
                self._profile.weight_backward,
            )
        )
        x, weight = _Half.apply(x, inputs), _Half.apply(self.weight, weights)  # type: ignore[no-untyped-call]
        return Linear.apply(x, weight, self._width, forward)  # type: ignore[no-untyped-call, no-any-return]
