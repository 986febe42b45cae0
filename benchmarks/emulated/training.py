"""What each process of an emulated run does: an ordinary Trainer, strategy and LightningModule."""

from __future__ import annotations

import fcntl
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
from benchmarks.emulated.sleeping import Passes, SleepingStage
from benchmarks.emulated.world import ACTION_SECONDS
from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.runtime.execution import intake
from lightning_tspipe.schedules.registry import build_step
from lightning_tspipe.simulation.cost import CostTable, StageCost

NUM_BATCHES = 4


def train(job: Job, connection: Connection) -> None:
    """Run one rank, for as long as the coordinator hands out tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate = Gate(connection)
    gate.listen()
    file = Path(str(dict(job.options)["plan"]))
    plan = Plan.from_json(file.read_text(encoding="utf-8"))
    share_schedules(file)
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
    passes = file.with_suffix(".passes") if job.method == "gpipe" else None
    trainer.fit(Emulated(plan, passes), GatedLoader(gate, [views] * NUM_BATCHES))


def share_schedules(plan: Path) -> None:
    """Let one process build each schedule, and the others read it.

    On a machine for each device they are built side by side; here as many as there are would share
    two cores for a minute.
    """

    def build_once(  # noqa: PLR0913 -- as what it stands in for
        name: str,
        pipeline: Pipeline,
        costs: CostTable,
        *,
        fresh: bool,
        ahead: int,
        split: frozenset[int] = frozenset(),
        depth: int = 1,
    ) -> Schedule:
        file = plan.with_suffix(f".{fresh}.{ahead}.txt")
        with file.open("a+", encoding="utf-8") as shared:
            fcntl.flock(shared, fcntl.LOCK_EX)
            shared.seek(0)
            text = shared.read()
            if text:
                return Schedule.parse(text, pipeline)
            schedule = build_step(
                name, pipeline, costs, fresh=fresh, ahead=ahead, split=split, depth=depth
            )
            shared.write(str(schedule))
            return schedule

    vars(intake)["build_step"] = build_once


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
        passes: The file of :class:`~.sleeping.Passes`, if the networks pass one after the other.
    """

    def __init__(self, plan: Plan, passes: Path | None = None) -> None:
        super().__init__()
        student, teacher = plan.pipeline.student, plan.pipeline.teacher
        assert teacher is not None
        self._is_paired = student.ranks[: teacher.num_stages] == teacher.ranks
        self.student = _network(plan.costs.student, 1)
        # Weights of another length keep a teacher that has no pair from being taken for one.
        self.teacher = _network(plan.costs.teacher, 1 if self._is_paired else 2)
        self.teacher.requires_grad_(requires_grad=False)
        if passes is not None:
            first, last = self.student[0], self.teacher[-1]
            assert isinstance(first, SleepingStage)
            assert isinstance(last, SleepingStage)
            first.waits = Passes(passes, student.num_units)
            last.tells = Passes(passes, teacher.num_units)

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
