"""Steps that become others while a training goes on: a second loss behind a warm-up, say.

Where an epoch begins, and where a step may go another way than those that were traced, the batch is
traced again, where the losses are::

    epoch 0   student(x), teacher(x)                captured
    epoch 1   student(x), teacher(x)                the same
    epoch 2   student(x), teacher(x), student(z)    another: captured again, placed anew

A step that was captured before is not captured again (:mod:`known_steps`).

Which way a step goes is known beforehand, as far as it follows from how far the training is; that
is the same on all ranks, which so decide alike without a word. Of attributes nobody knows that: a
hook may set one on a single rank.

Before a step that may be another one, no teacher runs ahead. It runs when the step begins, on the
weights that it would have had::

    global_step     3                       4                        5
    as asked        < 4                     not < 4: traced          the same
    teacher         T(3), not T(4): kept    T(4) on what was kept    T(5) was run in step 4
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError, FedByTrainedError, TrainedTeacherError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.replay.purity import Fingerprint
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.known_steps import KnownStep, Way
from lightning_tspipe.strategy.training.positions import (
    Questions,
    answers,
    noting,
    positions_noted,
    updates_until,
)
from lightning_tspipe.strategy.training.windows import begins_window

_POSITIONS = ("global_step", "current_epoch")
_MOST = 64  # questions, each of which is asked in each step
_REMEMBERED = 8  # steps; numbers between two networks may be others in each epoch


@dataclass(eq=False)
class Recapturing:
    """Tells whether a step has to be captured again.

    Attributes:
        run: The run.
        data: Its batches.
        holds_back: Whether no teacher runs ahead in this step.
        known: What the step has become, if it was captured before.
    """

    run: Run
    data: Data
    holds_back: bool = False
    known: KnownStep | None = None
    _asked: Questions = field(default_factory=dict)
    _heard: list[Any] = field(default_factory=list)
    """The same, as all ranks know them."""
    _now: KnownStep | None = None
    _known: deque[KnownStep] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """What was captured and can be placed again, on all ranks the same."""
    _captured: dict[str, Fingerprint] = field(default_factory=dict)
    """Of the teacher's tensors on this rank, when the step was captured."""
    _first: int = 0
    """The first batch since then."""

    def noting(self, step_of: Callable[[int], Step], batch_idx: int) -> Step:
        """A step that notes what it asks about how far the training is.

        Args:
            step_of: Gives the step, by the number of its batch.
            batch_idx: That number.
        """
        if len(self._asked) > _MOST:  # with numbers that are others each time: all begins anew
            self._asked.clear()
        asked: Questions = {}  # of numbers that a step keeps somewhere, nobody hears later
        step = step_of(noting(batch_idx, "batch_idx", asked))

        def run(batch: Any) -> Any:
            try:
                with positions_noted(self.run.trainer, _POSITIONS, asked):
                    return step(batch)
            finally:
                self._asked.update(asked)

        return run

    def begin(self, engine: Engine, batch_idx: int) -> None:
        """The step of a batch was captured, or was before; every rank calls it."""
        self._now, self.known = self.known or self._remember(engine), None
        asked = self._asked_anywhere() if engine.is_loss_rank else None
        asked = engine.transport.broadcast_object(asked, LOSS_RANK)
        self._hear(asked, batch_idx, serves=True)
        needs = bool(self._asked and engine.lookahead) and self._is_possible(engine)
        tensors = _teacher_of(engine) if needs else {}
        self._captured = {name: Fingerprint.of(tensor) for name, tensor in tensors.items()}
        _, self._first = engine.position

    @property
    def _served(self) -> set[Way]:
        """The ways that the pipeline serves."""
        return set() if self._now is None else self._now.ways

    def forget(self) -> None:
        """No step is known: the first one of a fit, or on another mesh, is about to be captured."""
        self._known.clear()
        self._now = self.known = None

    def _remember(self, engine: Engine) -> KnownStep:
        plan = self.run.resumption.now
        assert plan is not None
        known = KnownStep(engine.captured, plan, self.run.found)
        if engine.captured.plan.sets_networks:  # in what was captured before they are otherwise
            self._known.clear()
        elif self._is_possible(engine) and not engine.captured.beside:
            self._known.append(known)
        return known

    def _asked_anywhere(self) -> list[Any]:
        """The questions of all replicas, on the rank with the loss.

        Each may have asked other ones, for a batch of another size, say; but they trace together.
        """
        return list(dict.fromkeys(chain.from_iterable(self.run.replicas.gather(list(self._asked)))))

    def _hear(self, asked: list[Any], batch_idx: int, *, serves: bool) -> None:
        """All ranks ask the same, and know whether the way that was traced last is served."""
        if asked != self._heard:  # ways are answers to all questions
            self._served.clear()
            for known in self._known:
                known.ways.clear()
        self._heard = asked
        self._asked.clear()
        self._asked.update(dict.fromkeys(asked))
        if serves:
            way = self._way(batch_idx)
            for known in self._known:  # to which it may have led before
                known.ways.discard(way)
            self._served.add(way)

    def _way(self, batch_idx: int, updates: int = 0) -> Way:
        if not self._asked:
            return ()
        positions = {name: getattr(self.run.trainer, name) for name in _POSITIONS}
        positions["global_step"] += updates
        return answers(self._asked, {**positions, "batch_idx": batch_idx})

    def _is_possible(self, engine: Engine) -> bool:
        """Whether another step can be placed, and nothing is kept of this one for its weights."""
        return engine.weights is None and self._is_free(engine)

    def _is_free(self, engine: Engine) -> bool:
        bound = engine.mode.apart, engine.prediction  # to where stages are
        is_free = not any(each is not None for each in bound) and not self.run.freezing.is_on
        return is_free and not engine.shards.stays_spread

    def _is_drained(self, engine: Engine, batch_idx: int) -> bool:
        """Whether a window begins with a batch, so that nothing is in flight that is trained."""
        return begins_window(self.run, batch_idx) and self._is_free(engine)

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

        Args:
            engine: The engine.
            step_of: As for :meth:`noting`.
            batch: The batch, on the data rank.
            batch_idx: Its number.
            begins: Whether an epoch begins with it.

        Raises:
            CaptureError: A teacher that was held back changes, and did not when it was kept.
        """
        way = self._way(batch_idx)
        is_served = not begins and way in self._served
        was_held_back, self.holds_back = self.holds_back, False
        if was_held_back and not begins:
            self._check_held(engine)
        self.known = None
        can_be = self._is_possible(engine) or self._is_drained(engine, batch_idx)
        can_be &= begins or not engine.teacher_is_late
        if is_served or not can_be:
            return False
        if not begins:
            self.known = next((known for known in self._known if way in known.ways), None)
        serves = self.known is None and self._serves(engine, step_of, batch, batch_idx)
        nothing_is_ahead = begins or was_held_back or not engine.lookahead
        if serves or nothing_is_ahead or engine.weights is not None:
            return not serves
        # What has run ahead begins anew: a teacher that changes would not be one update late.
        return all(engine.transport.gather_everywhere(self._is_frozen(engine)))

    def _serves(
        self, engine: PipelineEngine, step_of: Callable[[int], Step], batch: Any, batch_idx: int
    ) -> bool:
        """Trace the step: whether the pipeline does it; else, whether it is known."""
        first = self.data.share(batch)
        found: tuple[list[bool], bool, list[Any]] | None = None
        if engine.is_loss_rank:
            every = [engine.captured, *(known.captured for known in self._known)]
            say, runs = self.run.replicas.all_say, not engine.losses.runner.has_other_hooks
            try:
                plan = engine.here.trace(self.noting(step_of, batch_idx), first)
                serving = [captured.plan.serves(plan) for captured in every]
                serves = next((c for c, is_so in zip(every, serving, strict=True) if is_so), None)
                loses = serves is not None and bool(serves.lost(plan.reached))
            except CaptureError as error:  # it is raised where the step comes to it, if it does,
                changes = isinstance(error, (TrainedTeacherError, FedByTrainedError))
                serving, loses = [not changes] * len(every), False  # or networks are found anew
            if not say(runs):  # none is what it was
                serving = []
            found = list(map(say, serving)), not say(not loses), self._asked_anywhere()
        with waiting("whether the step has become another one"):
            told = engine.transport.broadcast_object(found, LOSS_RANK)
        serving, loses, asked = told
        if not serving:
            self._known.clear()
        serves, *others = serving or [False]
        self._hear(asked, batch_idx, serves=serves)
        if not serves:
            known = zip(self._known, others, strict=True)
            self.known = next((each for each, is_so in known if is_so), None)
        step = self._now if serves else self.known
        if step is not None:
            step.loses |= loses
        engine.tells_lost |= serves and loses
        return bool(serves)

    # A teacher that is held back

    def look_ahead(self, engine: Engine, batch_idx: int) -> None:
        """Find out whether the next step may be another one; before each step, on every rank."""
        trainer: Any = self.run.trainer
        # Nobody knows beforehand which updates a step makes by hand.
        if self._asked and engine.lookahead and self.run.module.automatic_optimization:
            coming = self._way(batch_idx + 1, updates_until(trainer, 1))
            is_last = trainer.fit_loop.epoch_loop._num_ready_batches_reached()  # noqa: SLF001
            self.holds_back = (
                coming not in self._served and not is_last and self._is_possible(engine)
            )

    def hold(self, engine: Engine) -> None:
        """Keep the teacher where it would have run ahead of the next batch, if it is held back.

        One that has not changed since the step was captured is taken for frozen, and not copied;
        but not in the first step, behind which hooks may begin to change it.
        """
        if self.holds_back:
            _, coming = engine.position
            engine.late = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in _teacher_of(engine).items()
                if coming == self._first + 1 or not self._is_unchanged(name, tensor)
            }

    def _check_held(self, engine: Engine) -> None:
        late = engine.late or {}
        for name, tensor in _teacher_of(engine).items():
            if name not in late and not self._is_unchanged(name, tensor):
                raise CaptureError(
                    f"{name!r} begins to change with this step, which may also be another one than "
                    "before (it asks about the global_step or batch_idx): what the teacher was "
                    "before is gone. Let one of both begin with an epoch, or use "
                    "TSPipeStrategy(schedule='gpipe'), which does nothing a step early"
                )

    def _is_frozen(self, engine: Engine) -> bool:
        return all(self._is_unchanged(*each) for each in _teacher_of(engine).items())

    def _is_unchanged(self, name: str, tensor: Tensor) -> bool:
        return Fingerprint.of(tensor) == self._captured.get(name)


def _teacher_of(engine: Engine) -> dict[str, Tensor]:
    """The tensors of the teacher that are on this rank."""
    teacher = engine.captured.networks.get("teacher")
    atoms = () if teacher is None else teacher.atoms
    named = (each for atom in atoms for each in zip(atom.tensor_names, atom.tensors(), strict=True))
    return {name: tensor for name, tensor in named if not tensor.is_meta}
