"""Windows of batches between two updates, which synchronous schedules have in their pipelines."""

from __future__ import annotations

import logging
from functools import partial

from lightning_tspipe.capture.plan import StepPlan
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.weights.versions import StageWeights
from lightning_tspipe.schedules.windows import window
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import steps_seconds
from lightning_tspipe.strategy.lightning.run import Run
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


def within(run: Run, most: int) -> int:
    """How many of the next batches come before the next update, at most ``most``."""
    if not window_of(run):
        return most
    return sum(not updates_until(run.trainer, offset) for offset in range(1, most + 1))


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


def tell_of_idle(run: Run, engine: PipelineEngine) -> None:
    """Say how long devices will wait, where a window is short."""
    number, ranks = window_of(run), engine.transport.num_ranks
    wanted = _ENOUGH * ranks
    if not 0 < number < wanted:
        return
    share = partial(_busy, run.options.schedule, engine.pipeline)
    if share(number) < _FEW:
        log.warning(
            "a window of accumulate_grad_batches=%d batches keeps each of %d devices busy for "
            "%.0f %% of the time, one of %d batches for %.0f %%. Accumulate more (smaller) batches",
            number, ranks, share(number), wanted, share(wanted),
        )  # fmt: skip


def _busy(schedule: str, pipeline: Pipeline, number: int) -> float:
    """Percent of the time in which a device works, if stages take equally long."""
    whole, costs = window(schedule, pipeline, number), CostTable.uniform(pipeline)
    work = sum(map(costs.seconds, whole.actions)) / pipeline.num_ranks
    spent = steps_seconds([whole] * 2, costs) - steps_seconds([whole], costs)
    return 100 * work / spent
