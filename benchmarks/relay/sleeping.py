"""Blocks that take the time of real ones by sleeping, and pass on a few bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from benchmarks.emulated.sleeping import DEVICE
from lightning_tspipe import BlockwiseDistillation
from lightning_tspipe.planning.relay import BlockProfile


class _Sleep(Function):
    """Sleeps in its backward; the forward has slept already."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        return x + 0 * weight

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        DEVICE.occupy(ctx.seconds)
        (weight,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(weight), None


class SleepingBlock(nn.Module):
    """Takes so many seconds for each number of samples.

    Args:
        seconds: Of a forward, by the number of samples.
        backward: Seconds of a backward over those of a forward; 0 for a teacher.
        loader: What brings the batches; None: they are there.
    """

    def __init__(
        self, seconds: Mapping[int, float], backward: float, loader: Loader | None = None
    ) -> None:
        super().__init__()
        self._seconds, self._backward, self._loader = seconds, backward, loader
        self.weight = nn.Parameter(torch.zeros(1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Sleep.

        Args:
            x: Shape (samples, 1).

        Returns:
            The same.
        """
        known = self._seconds.get(len(x), 0.0)
        # Whoever only asks for shapes gets them at once.
        seconds = known if type(x) is Tensor and not x.is_meta else 0.0
        if seconds and self._loader is not None:
            self._loader.wait()
        DEVICE.occupy(seconds)
        result: Tensor = _Sleep.apply(x, self.weight, seconds * self._backward)
        return result


class Loader:
    """Reads batches beside the computation, a few in advance.

    Args:
        seconds: Of one batch, for all workers of the machine together.
        prefetch: Batches that may lie ready.
    """

    def __init__(self, seconds: float, prefetch: int = 1) -> None:
        self._seconds, self._prefetch = seconds, prefetch
        self._ready = 0.0

    def wait(self) -> None:
        """Until the next batch is there."""
        now = time.perf_counter()
        self._ready = max(self._ready, now - self._prefetch * self._seconds) + self._seconds
        DEVICE.occupy(self._ready - now)


class Sleeping(BlockwiseDistillation, LightningModule):
    """Teacher and student that sleep.

    Args:
        file: The blocks' costs, as ``pricing`` wrote them.
        load: Seconds to read a batch.
    """

    def __init__(self, file: Path, load: float) -> None:
        super().__init__()
        blocks = read_profile(file)
        loader = Loader(load) if load else None
        self.teacher = nn.Sequential(
            *(
                SleepingBlock(b.teacher, 0.0, loader if i == 0 else None)
                for i, b in enumerate(blocks)
            )
        )
        # A backward is two thirds of what a student takes.
        self.student = nn.Sequential(
            *(SleepingBlock({n: s / 3 for n, s in b.student.items()}, 2.0) for b in blocks)
        )

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.01)


def read_profile(file: Path) -> list[BlockProfile]:
    """What was written."""
    found = []
    for block in json.loads(file.read_text(encoding="utf-8")):
        for kind in ("teacher", "student"):
            block[kind] = {int(n): float(s) for n, s in block[kind].items()}
        found.append(BlockProfile(**block))
    return found
