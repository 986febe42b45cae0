"""Steps of windows, cut out of their orders.

Lightning has a step for each batch, and a step has one loss. So a window is cut into steps at the
times at which its losses begin: a step is a loss, and all that begins before the next one. Forwards
run before the step of their batch, and backwards end behind it (a negative offset)::

    interleaved, rank 0  |F0F1f0L0b0f1│L1b1B0F2F3│...
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule, walk
from lightning_tspipe.schedules.phases import assemble
from lightning_tspipe.schedules.windows import validated_window

_UNITS = {Op.FORWARD: 1, Op.TEACHER: 1, Op.BACKWARD: 2, Op.INPUT_BACKWARD: 1, Op.WEIGHT_BACKWARD: 1}
"""What an action takes, for cutting a window into steps."""

_CACHED = 1000
"""Steps that are kept; long windows repeat a few."""


@dataclass(frozen=True)
class Progress:
    """How far a window is, at the end of a step.

    Attributes:
        place: Batches of the window whose losses have run.
        done: What was done of these and of the batches behind them, with places as offsets. The
            first batches are left out when all of them is done.
    """

    place: int = 0
    done: frozenset[Action] = frozenset()

    def to_plain(self) -> list[Any]:
        """As plain values, for a checkpoint."""
        return [self.place, sorted(map(str, self.done))]

    @classmethod
    def from_plain(cls, written: Sequence[Any]) -> Progress:
        """Read what :meth:`to_plain` returned."""
        place, done = written
        return cls(place, frozenset(map(Action.parse, done)))


NOTHING = Progress()
"""Nothing is in flight."""

BEGUN = Progress(1)
"""Something is; where no backward ends behind its step, nobody has to know what."""


@dataclass
class WindowSteps:
    """The steps of windows: what all ranks do between the losses of two batches.

    How far a window goes is known for the next batches only; an order is made of those.

    Args:
        name: Name of the order.
        pipeline: The pipeline.
    """

    name: str
    pipeline: Pipeline

    def __post_init__(self) -> None:
        self._whole = lru_cache(_CACHED)(partial(validated_window, self.name, self.pipeline))
        self.step = lru_cache(_CACHED)(self._step)
        self.rest = lru_cache(_CACHED)(self._rest)

    @cached_property
    def lookahead(self) -> int:
        """How many batches behind its own a step works on, or has to know of."""
        size, ahead = self.pipeline.num_ranks, 0
        whole, done = self._whole(6 * size), frozenset[Action]()
        for place in range(2 * size):
            cut = _cut(whole, place, done)
            ahead = max(ahead, *(action.batch - place for action in cut))
            done |= cut
        return ahead + size  # it is filled by as many at once

    @property
    def everything(self) -> Schedule:
        """An order that has all kinds of messages."""
        return self._whole(self.lookahead + 1)

    def _step(self, before: Progress, ahead: int) -> tuple[Schedule, Progress]:
        """A step: its loss, and all that begins before the next one.

        Args:
            before: How far the window is.
            ahead: Batches of the window behind this one, as far as they are known.

        Returns:
            The step, and how far the window is behind it.
        """
        number, size = before.place + 1 + ahead, self.pipeline.num_ranks
        if ahead >= self.lookahead:  # it goes on: in whole groups
            number -= number % size
        whole = self._whole(number)
        cut = _cut(whole, before.place, before.done)
        return self._made(whole, before, cut, before.place)

    def _rest(self, before: Progress) -> tuple[Schedule, Progress]:
        """What is still to do for batches whose losses have run, behind the last step.

        Args:
            before: How far the window is.
        """
        whole = self._whole(before.place)
        return self._made(whole, before, frozenset(_work(whole)) - before.done, before.place - 1)

    def _made(
        self, whole: Schedule, before: Progress, cut: frozenset[Action], place: int
    ) -> tuple[Schedule, Progress]:
        own = (replace(a, batch=a.batch - place) for a in whole.actions if a in cut)
        read = sorted(batch - place for batch in _read_by(cut) - _read_by(before.done))
        step = assemble(self.pipeline, own, batches=read)
        after = self._shortened(Progress(place + 1, before.done | cut), whole)
        return replace(step, asynchronous=True, halves=whole.halves), after

    def _shortened(self, progress: Progress, whole: Schedule) -> Progress:
        """Without the first batches, if all is done: then long windows have few kinds of steps."""
        left = {action.batch for action in _work(whole) if action not in progress.done}
        size = self.pipeline.num_ranks
        first = min([*left, progress.place]) // size * size
        done = (replace(a, batch=a.batch - first) for a in progress.done if a.batch >= first)
        return Progress(progress.place - first, frozenset(done))


def _work(schedule: Schedule) -> Iterator[Action]:
    """Its actions that belong to a batch, without the reading of it."""
    return (a for a in schedule.actions if a.unit is not None or a.op is Op.LOSS)


def _cut(whole: Schedule, place: int, done: frozenset[Action]) -> frozenset[Action]:
    """What begins before the next loss, of what is left of a window."""
    work = frozenset(_work(whole)) - done
    ranks = [[action for action in actions if action in work] for actions in whole.ranks]
    starts = _starts(whole, ranks, done)
    if len(starts) < len(work):
        raise ScheduleError(f"the order of a window deadlocks\n{whole}")
    end = starts.get(Action(Op.LOSS, whole.pipeline.loss_rank, batch=place + 1), math.inf)
    return frozenset(action for action, start in starts.items() if start < end)


def _read_by(actions: Collection[Action]) -> set[int]:
    """The batches that first stages have read."""
    return {a.batch for a in actions if not a.stage and a.op in {Op.FORWARD, Op.TEACHER}}


def _starts(
    whole: Schedule, ranks: Sequence[Sequence[Action]], done: Collection[Action]
) -> dict[Action, int]:
    """When actions begin, if a forward takes as long as half a backward, and a loss no time."""
    ends: dict[Action, int] = dict.fromkeys(done, 0)
    starts: dict[Action, int] = {}
    free = [0] * len(ranks)
    needs = {
        action: [need.producer for need in whole.needs[action] if need.producer.op is not Op.DATA]
        for action in chain.from_iterable(ranks)
    }
    for rank, action in walk(ranks, lambda action: all(need in ends for need in needs[action])):
        starts[action] = max(free[rank], *(ends[need] for need in needs[action]), 0)
        ends[action] = free[rank] = starts[action] + _UNITS.get(action.op, 0)
    return starts
