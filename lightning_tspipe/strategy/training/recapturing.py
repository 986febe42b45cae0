"""Steps that become others while a training goes on: a second loss behind a warm-up, say.

The first batch of an epoch is traced again, where the losses are::

    epoch 0   student(x), teacher(x)                captured
    epoch 1   student(x), teacher(x)                the same
    epoch 2   student(x), teacher(x), student(z)    another: captured again, placed anew
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.training.data import Data


@dataclass(frozen=True)
class Recapturing:
    """Tells whether a step has to be captured again.

    Attributes:
        run: The run.
        data: Its batches.
    """

    run: Run
    data: Data

    def _is_possible(self, engine: PipelineEngine) -> bool:
        bound = engine.weights, engine.mode.apart, engine.prediction  # to where stages are
        is_free = not any(each is not None for each in bound) and not self.run.freezing.is_on
        return is_free and not engine.shards.stays_spread

    def is_another(self, engine: PipelineEngine, step: Step, batch: Any) -> bool:
        """Whether an epoch begins with a step that the pipeline does not serve; on every rank.

        What can't be traced is an error where the step comes to it, if it does.

        Args:
            engine: The engine, of which nothing is under way.
            step: The step, a function of the batch.
            batch: The batch, on the data rank.
        """
        if not self._is_possible(engine):
            return False
        first = self.data.share(batch)
        found: bool | None = None
        if engine.is_loss_rank:
            try:
                serves = engine.captured.plan.serves(engine.here.trace(step, first))
            except CaptureError:
                serves = True
            found = not self.run.replicas.all_say(serves)
        return bool(engine.transport.broadcast_object(found, LOSS_RANK))
