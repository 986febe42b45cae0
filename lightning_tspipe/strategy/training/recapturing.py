"""Steps that become others while a training goes on: a second loss behind a warm-up, say.

Where an epoch begins, and where a step may go another way than those that were traced, the batch is
traced again, where the losses are::

    epoch 0   student(x), teacher(x)                captured
    epoch 1   student(x), teacher(x)                the same
    epoch 2   student(x), teacher(x), student(z)    another: captured again, placed anew

Which way a step goes is known beforehand, as far as it follows from how far the training is; that
is the same on all ranks, which so decide alike without a word. Of attributes nobody knows that: a
hook may set one on a single rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.positions import (
    Questions,
    answers,
    noting,
    positions_noted,
)

_POSITIONS = ("global_step", "current_epoch")
Way = tuple[bool | None, ...]
"""Answers to what steps ask."""


@dataclass(eq=False)
class Recapturing:
    """Tells whether a step has to be captured again.

    Attributes:
        run: The run.
        data: Its batches.
    """

    run: Run
    data: Data
    _asked: Questions = field(default_factory=dict)
    _served: set[Way] = field(default_factory=set)
    """The ways that the pipeline serves."""
    _versions: list[int] = field(default_factory=list)
    """Of the tensors of forward-only networks, when they were captured."""

    def noting(self, step_of: Callable[[int], Step], batch_idx: int) -> Step:
        """A step that notes what it asks about how far the training is.

        Args:
            step_of: Gives the step, by the number of its batch.
            batch_idx: That number.
        """
        step = step_of(noting(batch_idx, "batch_idx", self._asked))

        def run(batch: Any) -> Any:
            with positions_noted(self.run.trainer, _POSITIONS, self._asked):
                return step(batch)

        return run

    def begin(self, batch_idx: int) -> None:
        """The step of a batch was captured; every rank calls it."""
        self._served.clear()
        self._versions = self._teacher_versions()
        self._hear(self.run.transport.broadcast_object(list(self._asked), LOSS_RANK), batch_idx)

    def _hear(self, asked: list[Any], batch_idx: int) -> None:
        """All ranks ask the same; the way that was traced last is served."""
        self._asked.clear()
        self._asked.update(dict.fromkeys(asked))
        way = self._way(batch_idx)
        self._served = {one for one in self._served if len(one) == len(way)} | {way}

    def _way(self, batch_idx: int) -> Way:
        positions = {name: getattr(self.run.trainer, name) for name in _POSITIONS}
        return answers(self._asked, {**positions, "batch_idx": batch_idx})

    def _teacher_versions(self) -> list[int]:
        engine = self.run.engine
        teacher = None if engine is None else engine.captured.networks.get("teacher")
        tensors = [] if teacher is None else [t for atom in teacher.atoms for t in atom.tensors()]
        return [tensor._version for tensor in tensors]  # noqa: SLF001 - no public way

    def _is_possible(self, engine: PipelineEngine) -> bool:
        bound = engine.weights, engine.mode.apart, engine.prediction  # to where stages are
        is_free = not any(each is not None for each in bound) and not self.run.freezing.is_on
        return is_free and not engine.shards.stays_spread

    def is_another(
        self,
        engine: PipelineEngine,
        step_of: Callable[[int], Step],
        batch: Any,
        batch_idx: int,
        *,
        begins: bool,
    ) -> bool:
        """Whether the step that is about to begin has to be captured again; on every rank.

        Where it can't be, what it does otherwise is an error when it comes to that.

        Args:
            engine: The engine.
            step_of: As for :meth:`noting`.
            batch: The batch, on the data rank.
            batch_idx: Its number.
            begins: Whether an epoch begins with it.

        Raises:
            CaptureError: The step can't be captured.
        """
        is_known = not begins and self._way(batch_idx) in self._served
        if is_known or not self._is_possible(engine):
            return False
        first = self.data.share(batch)
        found: tuple[bool, bool, list[Any]] | None = None
        if engine.is_loss_rank:
            plan = engine.here.trace(self.noting(step_of, batch_idx), first)
            serves = self.run.replicas.all_say(engine.captured.plan.serves(plan))
            found = serves, plan.has_ema, list(self._asked)
        serves, averages, asked = engine.transport.broadcast_object(found, LOSS_RANK)
        if serves:
            self._hear(asked, batch_idx)
        elif not begins and engine.lookahead:
            own = averages or self._teacher_versions() != self._versions
            # What has run ahead begins anew: a teacher that changes would not be one update late.
            return not any(engine.transport.gather_everywhere(own))
        return not serves
