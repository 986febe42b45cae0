"""One emulated training: an ordinary Trainer and strategy, and a student that sleeps.

    python -m benchmarks.schedules.emulation plan.json seconds.json [two_phases]

The file gets the seconds of each window but the first.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.emulated.sleeping import DEVICE, SleepingStage
from benchmarks.emulated.training import one_atom_per_stage
from benchmarks.emulated.world import ACTION_SECONDS
from benchmarks.language.two_phase import two_phases
from benchmarks.schedules.models import SAMPLES
from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.workload import LOSS_ACTIONS
from lightning_tspipe.simulation.cost import StageCost

WINDOWS = 5


class Sleeps(LightningModule):
    """A student that takes the time of a plan's stages, and a frozen teacher, if there is one."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.student = _network(plan.costs.student, 1)
        self.teacher: nn.Module | None = None
        if plan.costs.teacher:
            self.teacher = _network(plan.costs.teacher, 2).requires_grad_(requires_grad=False)
        self._loss_seconds = plan.costs.loss - LOSS_ACTIONS * ACTION_SECONDS

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.student(batch).mean()
        if self.teacher is not None:
            with torch.no_grad():
                guide = self.teacher(batch).mean()
            loss = loss + guide
        DEVICE.occupy(self._loss_seconds)
        return loss

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.01)


def _network(costs: tuple[StageCost, ...], num_weights: int) -> nn.Sequential:
    def without_overhead(cost: StageCost) -> StageCost:
        names = ("forward", "backward", "input_backward", "weight_backward")
        times = {name: max(0.0, getattr(cost, name) - ACTION_SECONDS) for name in names}
        return replace(cost, **times)

    return nn.Sequential(*(SleepingStage(without_overhead(cost), num_weights) for cost in costs))


class Clock(Callback):
    """Notes when windows end on rank 0."""

    def __init__(self, every: int, file: Path) -> None:
        self._every, self._file = every, file
        self._ends: list[float] = []

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self._every == 0:
            self._ends.append(time.perf_counter())

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 0:
            ends = self._ends
            seconds = [b - a for a, b in pairwise(ends)]
            self._file.write_text(json.dumps(seconds), encoding="utf-8")


def main() -> None:
    """Train as the plan says."""
    torch.set_num_threads(1)
    plan = Plan.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    module = Sleeps(plan)
    callbacks: list[Callback] = [Clock(plan.window or 1, Path(sys.argv[2]))]
    if sys.argv[3:]:
        callbacks.append(two_phases())
    # Of GPipe, whose window is one batch, the micro-batches are in it.
    every = plan.window or 1
    batch = torch.zeros(SAMPLES * (1 if plan.window else plan.num_microbatches), 1)
    options: dict[str, Any] = {"schedule": plan.schedule}
    if plan.schedule == "1f1b":
        options["weights"] = "synchronous"
    trainer = Trainer(
        accelerator="cpu",
        strategy=TSPipeStrategy(plan=one_atom_per_stage(plan), **options),
        devices=plan.pipeline.num_ranks,
        accumulate_grad_batches=every,
        callbacks=callbacks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches: Any = [batch] * (every * WINDOWS)
    trainer.fit(module, DataLoader(batches, batch_size=None))


if __name__ == "__main__":
    main()
