"""What each process of an emulated run does: an ordinary Trainer, strategy and LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from lightly.models.utils import update_momentum
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from benchmarks.crews.gate import Gate, GatedLoader
from benchmarks.crews.job import Job
from benchmarks.emulated.sleeping import SleepingStage
from benchmarks.emulated.world import ACTION_SECONDS
from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.simulation.cost import StageCost

NUM_BATCHES = 4


def train(job: Job, connection: Connection) -> None:
    """Run one rank, for as long as the coordinator hands out tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate = Gate(connection)
    gate.listen()
    plan = Plan.from_json(Path(str(dict(job.options)["plan"])).read_text(encoding="utf-8"))
    views = tuple(torch.zeros(job.batch_size, 1) for _ in range(plan.pipeline.student.num_calls))
    trainer = Trainer(
        accelerator="cpu",
        strategy=TSPipeStrategy(plan=one_atom_per_stage(plan)),
        devices=job.num_ranks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Emulated(plan), GatedLoader(gate, [views] * NUM_BATCHES))


def one_atom_per_stage(plan: Plan) -> Plan:
    """The same plan for networks whose stages are single modules."""
    student, teacher = plan.pipeline.student, plan.pipeline.teacher
    num_teacher_stages = 0 if teacher is None else teacher.num_stages
    return replace(
        plan,
        student_cuts=tuple(range(student.num_stages + 1)),
        teacher_cuts=tuple(range(num_teacher_stages + 1)) if num_teacher_stages else (),
    )


class Emulated(LightningModule):
    """A teacher and a student that sleep.

    Args:
        plan: Who holds what, and what it costs; as in its costs, each action's time includes
            :data:`ACTION_SECONDS` for the executor, which here takes its own time.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        student, teacher = plan.pipeline.student, plan.pipeline.teacher
        assert teacher is not None
        self._is_paired = student.ranks[: teacher.num_stages] == teacher.ranks
        self.student = _network(plan.costs.student, 1)
        # Weights of another length keep a teacher that has no pair from being taken for one.
        self.teacher = _network(plan.costs.teacher, 1 if self._is_paired else 2)
        self.teacher.requires_grad_(requires_grad=False)

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        if self._is_paired:
            update_momentum(self.student, self.teacher, 0.99)
        predictions = [self.student(view) for view in batch]
        with torch.no_grad():
            targets = [self.teacher(view) for view in batch]
        sums = [p.mean() + t.mean() for p, t in zip(predictions, targets, strict=True)]
        return torch.stack(sums).sum()

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.01)


def _network(costs: Sequence[StageCost], num_weights: int) -> nn.Sequential:
    return nn.Sequential(*(SleepingStage(_without_overhead(cost), num_weights) for cost in costs))


def _without_overhead(cost: StageCost) -> StageCost:
    times = {
        name: max(0.0, getattr(cost, name) - ACTION_SECONDS)
        for name in ("forward", "backward", "input_backward", "weight_backward")
    }
    return replace(cost, **times)
