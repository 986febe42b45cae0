"""Windows of batches between two updates, which synchronous schedules have in their pipelines."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from lightning_tspipe.capture.plan import StepPlan
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.execution.teacher_ahead import Allowed
from lightning_tspipe.runtime.weights.versions import StageWeights
from lightning_tspipe.schedules.window_steps import When, steady_window
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import steps_seconds
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import declared_delay
from lightning_tspipe.strategy.setup.refusals import refuse
from lightning_tspipe.strategy.training.positions import updates_until

log = logging.getLogger("lightning_tspipe")
_ENOUGH = 4
"""Times as many batches as ranks keep these busy for most of the time."""
_FEW = 80.0


def window_of(run: Run) -> int:
    """Batches behind which the pipeline is drained; 0: it isn't for an update."""
    policy = run.options.policy
    is_drained = policy is not None and policy.is_synchronous
    return int(run.trainer.accumulate_grad_batches) if is_drained else 0


def within(run: Run, most: int, updates: int = 0) -> int:
    """How many of the next batches come before an update, at most ``most``.

    Args:
        run: The run.
        most: So many at most.
        updates: How many updates may come before them.
    """
    if not window_of(run):
        return most
    return sum(updates_until(run.trainer, offset) <= updates for offset in range(1, most + 1))


def begins_window(run: Run, batch_idx: int) -> bool:
    """Whether a window begins with a batch."""
    every = window_of(run)
    return bool(every) and batch_idx % every == 0


def teacher_ahead(run: Run, plan: StepPlan) -> Allowed | None:
    """Whether a teacher may run ahead of updates, as far as it is known before the first one.

    Args:
        run: The run.
        plan: The captured step.

    Raises:
        ConfigurationError: It is said to be late, in whole windows, where none can be.
    """
    trainer: Any = run.trainer
    declared = declared_delay(trainer)
    is_late = bool(late_windows(run))
    changes = plan.has_effects or plan.has_late_effects
    refuse({
        "DelayedTeacherUpdate(windows=True) says that the teacher is one update late for all "
        f"batches of a window, but under schedule={run.options.schedule!r} no window is in the "
        "pipeline. Use tspipe_1f1b, tspipe_interleaved or tspipe_zbv, or leave windows out":
        is_late and not window_of(run),
        "DelayedTeacherUpdate(windows=True): training_step itself changes parameters of networks, "
        "and forwards of the teacher run ahead of that. Use MomentumEMA, which averages after each "
        "update": is_late and changes,
        "DelayedTeacherUpdate(windows=True) with FreezeAndRepack: what is frozen changes what runs "
        "ahead. Leave one of them out": is_late and run.freezing.is_on,
    })  # fmt: skip
    if not window_of(run) or changes or run.freezing.is_on:
        return None
    is_newest = declared is not None and not declared.delay
    if is_newest or (run.options.averages and not is_late):
        return None
    return Allowed(declared.start_step, late_windows(run)) if is_late else Allowed()


def runs_of(allowed: Allowed | None) -> When:
    """When a teacher runs."""
    return "now" if allowed is None else allowed.runs


def late_windows(run: Run) -> int:
    """Batches of the longest window, if a teacher is declared to be late in all of it; else 0."""
    trainer: Any = run.trainer
    declared = declared_delay(trainer)
    if not (getattr(declared, "windows", False) and declared.delay):
        return 0
    tables = (getattr(callback, "scheduling", {}) for callback in trainer.callbacks)
    longest = (every for table in tables for every in table.values())
    return max(map(int, [trainer.accumulate_grad_batches, *longest]))


def refuse_window(weights: StageWeights, plan: StepPlan, every: int) -> None:
    """Refuse a window whose batches would meet other networks than on one device.

    Args:
        weights: The weights of a rank.
        plan: The captured step.
        every: Batches per update.

    Raises:
        ConfigurationError: The step itself changes networks, batch after batch.
    """
    is_late = weights.policy.is_synchronous and weights.num_ranks > 1 and every > 1
    refuse({
        f"a window of accumulate_grad_batches={every} batches: training_step changes "
        "parameters of networks in each batch (an average, say), and forwards of the batches of a "
        "window run ahead of that. Use MomentumEMA, which averages after each update, or "
        "schedule='tspipe'": is_late and (plan.has_effects or plan.has_late_effects),
    })  # fmt: skip


def refuse_lost_teacher(engine: Engine, run: Run, batch_idx: int) -> None:
    """Refuse to go on within an epoch without what a late teacher gave ahead of the last update.

    Args:
        engine: The engine, which goes on as another one stopped.
        run: The run.
        batch_idx: The batch that is next.

    Raises:
        ConfigurationError: It isn't there.
    """
    lacks = engine.lacks_late_teacher(run.trainer.global_step)
    refuse({
        "the checkpoint was saved within an epoch, and doesn't hold what the late teacher "
        "(DelayedTeacherUpdate(windows=True)) gave before the last update, or other ranks did. "
        "Resume with the same devices and the same partition, from a checkpoint that was saved "
        "between two batches, or from one at the end of an epoch": lacks and batch_idx > 0,
    })  # fmt: skip


def tell_of_idle(run: Run, engine: PipelineEngine) -> None:
    """Say how long devices will wait, where a window is short."""
    number, ranks = window_of(run), engine.transport.num_ranks
    wanted = _ENOUGH * ranks
    if not 0 < number < wanted:
        return
    runs = runs_of(teacher_ahead(run, engine.captured.plan))
    schedule, split = run.options.schedule, engine.placement.split
    share = partial(_busy, schedule, engine.pipeline, runs, split)
    if share(number) < _FEW:
        log.warning(
            "a window of accumulate_grad_batches=%d batches keeps each of %d devices busy for "
            "%.0f %% of the time, one of %d batches for %.0f %%. Accumulate more (smaller) batches",
            number, ranks, share(number), wanted, share(wanted),
        )  # fmt: skip


def _busy(
    schedule: str, pipeline: Pipeline, runs: When, split: frozenset[int], number: int
) -> float:
    """Percent of the time in which a device works, if stages take equally long."""
    costs = CostTable.uniform(pipeline)
    whole = steady_window(schedule, pipeline, number, runs, split=split)
    work = sum(map(costs.seconds, whole.actions)) / pipeline.num_ranks
    spent = steps_seconds([whole] * 2, costs) - steps_seconds([whole], costs)
    return 100 * work / spent
