"""A network so small that a step is nearly all overhead, to weigh the executor's actions."""

from __future__ import annotations

import copy

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from benchmarks.throughput.entries import TINY_MICROBATCHES
from benchmarks.throughput.workloads import Workload

WIDTH = 16
NUM_LAYERS = 4


class TinyWorkload(Workload):
    """Two views of ``(batch, WIDTH)`` instead of images."""

    @override
    def _batch(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (batch_size, WIDTH)
        return tuple(torch.randn(shape, generator=generator) for _ in range(self.num_views))


class Tiny(LightningModule):
    """A teacher and a student of a few small layers, two views."""

    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers))
        self.student = nn.Sequential(*layers)
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = torch.stack([self.student(view) for view in batch])
        with torch.no_grad():
            targets = torch.stack([self.teacher(view) for view in batch])
        return (outputs - targets.flip(0)).square().mean()

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.01)


class HalfOfTiny(Tiny):
    """What one rank of two computes, alone: half of the layers, in the same micro-batches."""

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS // 2)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        chunks = [chunk for view in batch for chunk in view.chunk(TINY_MICROBATCHES)]
        with torch.no_grad():
            targets = torch.stack([self.teacher(chunk) for chunk in chunks])
        outputs = [self.student(chunk) for chunk in chunks]
        joined = torch.stack([output.detach() for output in outputs]).requires_grad_()
        loss = (joined - targets).square().mean()
        (gradient,) = torch.autograd.grad(loss, joined)
        for output, part in zip(outputs[1:], gradient[1:], strict=True):
            output.backward(part)
        # The Trainer runs the last unit's backward: this loss has the gradient that is due.
        first: Tensor = (outputs[0] * gradient[0]).sum()
        return first


TINY = TinyWorkload("tiny", Tiny, 2, labelled=False)
