"""Windows of batches between two updates, as synchronous 1F1B has them in its pipeline."""

from __future__ import annotations

import logging

from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.strategy.lightning.run import Run
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


def tell_of_idle(run: Run, engine: PipelineEngine) -> None:
    """Say how long devices will wait, where a window is short."""
    number, ranks = window_of(run), engine.transport.num_ranks
    wanted = _ENOUGH * ranks
    if number and _busy(number, ranks) < _FEW:
        log.warning(
            "a window of accumulate_grad_batches=%d batches keeps each of %d devices busy for "
            "%.0f %% of the time, one of %d batches for %.0f %%. Accumulate more (smaller) batches",
            number, ranks, _busy(number, ranks), wanted, _busy(wanted, ranks),
        )  # fmt: skip


def _busy(number: int, ranks: int) -> float:
    """Percent of the time in which a device works, if stages take equally long."""
    return 100 * number / (number + ranks - 1)
