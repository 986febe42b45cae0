"""Steps of windows, cut out of their orders.

Lightning has a step for each batch, and a step has one loss. A window whose stages take turns is
cut where its losses begin: a step is a loss, and all that begins before the next one. Forwards run
before the step of their batch, and backwards end behind it (a negative offset). With one stage per
rank (``1f1b``) each rank's step ends with its backward of the batch::

    interleaved, rank 0  |F0F1f0L0b0f1│L1b1B0F2F3│...
    1f1b, rank 1         |F0F1  B0│F2B1│F3B2│  B3│

When all this begins follows from a walk: without costs each forward takes as long as half a
backward. If the teacher may run ahead of an update, a rank that has to wait there runs a forward of
the teacher that was to come later, or is of the next window::

    rank 0  |T0F0L0B0F1L1B1t2t3│F2L2B2...     a window of two batches; t: of the next one
    rank 1  |F0F1t2t3B0    B1  │F2F3t4t5B2
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from statistics import fmean
from typing import Any, Literal

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import FRAME, validate_window
from lightning_tspipe.schedules.phases import assemble
from lightning_tspipe.schedules.windows import ACROSS_STEPS, window
from lightning_tspipe.simulation.cost import CostTable

_UNITS = {Op.FORWARD: 1, Op.TEACHER: 1, Op.BACKWARD: 2, Op.INPUT_BACKWARD: 1, Op.WEIGHT_BACKWARD: 1}
"""What an action takes, for a walk without costs."""

_PER_FORWARD = 8
"""Units that a forward of the student takes on average, for a walk by costs: integers, so that all
ranks and a run that is resumed walk alike."""

_CACHED = 1000
"""Steps that are kept; long windows repeat a few."""

_ROUNDS_AHEAD = 3
"""Forwards of the teacher that fill the time in which 1F1B waits: for each rank, at most as many as
fit beside a batch of each stage."""

_UNTIL_STEADY = 3
"""Windows behind which teachers are as far ahead as they will be."""

When = Literal["now", "ahead", "late"]


@dataclass(frozen=True)
class Progress:
    """How far a window is, at the end of a step.

    Attributes:
        place: Batches of the window whose losses have run.
        done: What was done of these and of the batches behind them, with places as offsets. The
            first batches are left out when all of them is done.
        ends: When those end that have not ended everywhere, in units of the walk.
        early: What was done before its step, where a window was interrupted: for a checkpoint, say.
            Steps then leave it out, and are the same otherwise: what random numbers a forward
            draws must not depend on whether somebody saved.
    """

    place: int = 0
    done: frozenset[Action] = frozenset()
    ends: frozenset[tuple[Action, int]] = frozenset()
    early: frozenset[Action] = frozenset()

    def moved(self, first: int) -> Progress:
        """With another place as the first one, and nothing of what is before."""
        done, early = (
            frozenset(replace(a, batch=a.batch - first) for a in actions if a.batch >= first)
            for actions in (self.done, self.early)
        )
        ends = frozenset((replace(a, batch=a.batch - first), end) for a, end in self.ends)
        return Progress(self.place - first, done, ends, early)

    @property
    def begun(self) -> frozenset[int]:
        """The places of the batches of which something is done."""
        return frozenset(action.batch for action in self.done)

    def to_plain(self) -> list[Any]:
        """As plain values, for a checkpoint."""
        ends = sorted([str(action), end] for action, end in self.ends)
        return [self.place, sorted(map(str, self.done)), ends, sorted(map(str, self.early))]

    @classmethod
    def from_plain(cls, written: Sequence[Any]) -> Progress:
        """Read what :meth:`to_plain` returned."""
        place, done, ends, early = written
        until = frozenset((Action.parse(action), end) for action, end in ends)
        done, early = (frozenset(map(Action.parse, actions)) for actions in (done, early))
        return cls(place, done, until, early)


NOTHING = Progress()
"""Nothing is in flight."""

BEGUN = Progress(1)
"""Something is; where no backward ends behind its step, nobody has to know what."""


@dataclass(frozen=True)
class Durations:
    """What actions take in a walk, in its units.

    Attributes:
        teacher: Of a forward of the teacher, where those of all stages take equally long.
        by_stage: Of each op, for each of its stages; empty without costs.
        loss: Of a loss.
    """

    teacher: int = 1
    by_stage: tuple[tuple[Op, tuple[int, ...]], ...] = ()
    loss: int = 0

    @classmethod
    def of(cls, name: str, pipeline: Pipeline, costs: CostTable | None) -> Durations:
        """Those of costs: of 1F1B by stage, of other orders on average.

        Args:
            name: Name of the order.
            pipeline: The pipeline.
            costs: Of its stages; None: both networks take equally long.
        """
        student, teacher = pipeline.student, pipeline.teacher
        if teacher is None:
            return cls()
        if costs is None:
            return cls(max(1, round(student.num_stages / teacher.num_stages)))
        mean = fmean(stage.forward for stage in costs.student)
        if not mean:
            return cls()
        if name in ACROSS_STEPS:
            return cls(max(1, round(fmean(stage.forward for stage in costs.teacher) / mean)))
        unit = mean / _PER_FORWARD

        def stages(op: Op) -> tuple[int, ...]:
            number = pipeline.layout(op).num_stages
            seconds = (costs.seconds(Action(op, stage, 0)) for stage in range(number))
            return tuple(max(1, round(each / unit)) for each in seconds)

        return cls(1, tuple((op, stages(op)) for op in _UNITS), round(costs.loss / unit))

    def __call__(self, action: Action) -> int:
        """Of an action."""
        if action.op is Op.LOSS:
            return self.loss
        if action.op in self._by_op:
            return self._by_op[action.op][action.stage]
        return self.teacher if action.op is Op.TEACHER else _UNITS.get(action.op, 0)

    @cached_property
    def _by_op(self) -> dict[Op, tuple[int, ...]]:
        return dict(self.by_stage)


@dataclass
class WindowSteps:
    """The steps of windows: what all ranks do up to the loss of the next batch.

    How far a window goes is known for the next batches only; an order is made of those.

    Args:
        name: Name of the order.
        pipeline: The pipeline.
        teacher: When it runs: ``"now"`` right before its student, ``"ahead"`` also where a rank
            would wait, and ``"late"`` so and always before the update ahead of its batch.
        longest: Batches of the longest window, for a teacher that is late.
        durations: What actions take, for the walk.
        split: Stages whose backward runs in two halves; of ``zbv`` all do.
    """

    name: str
    pipeline: Pipeline
    teacher: When = "now"
    longest: int = 1
    durations: Durations = Durations()
    split: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._whole = lru_cache(_CACHED)(self._validated)
        self.step = lru_cache(_CACHED)(self._step)
        self.rest = lru_cache(_CACHED)(self._rest)

    def _validated(self, number: int, beyond: int = 0) -> Schedule:
        whole = window(self.name, self.pipeline, number, beyond, self.split)
        validate_window(whole, number, beyond)
        return whole

    @cached_property
    def lookahead(self) -> int:
        """How many batches behind its own a step works on, or has to know of."""
        size = self.pipeline.num_ranks
        if self.teacher != "now":
            longest = self.longest if self.teacher == "late" else 1
            return max(_ROUNDS_AHEAD * size, longest)
        before, ahead = NOTHING, 0
        whole = self._whole(6 * size)
        for place in range(2 * size):
            step, before = self._made(whole, Progress(place, before.done, before.ends), 6 * size)
            ahead = max(ahead, *(action.batch for action in step.actions))
        return ahead + size  # it is filled by as many at once

    @cached_property
    def everything(self) -> Schedule:
        """An order that has all kinds of messages."""
        return self._whole(self.lookahead + 1)

    def windows(self, number: int, count: int) -> list[Schedule]:
        """Windows that follow each other, each as one schedule.

        Args:
            number: Batches of each; the offsets of actions are their places in it.
            count: How many windows.
        """
        whole, before = list[Schedule](), NOTHING
        halves = self.everything.halves
        for _ in range(count):
            actions: list[Action] = []
            for place in range(number):
                left = number - 1 - place
                ahead = min(self.lookahead, left)
                beyond = 0 if self.teacher == "now" or ahead < left else self.lookahead - ahead
                step, before = self.step(before, ahead, min(beyond, number))
                actions += (replace(a, batch=a.batch + place) for a in step.actions)
            before = before if not before.place else NOTHING
            read = (action.batch for action in actions if action.op is Op.DATA)
            work = (a for a in actions if a.op not in {*FRAME, Op.DATA})
            made = assemble(self.pipeline, work, batches=sorted(read))
            whole.append(replace(made, asynchronous=True, halves=halves))
        return whole

    def _step(self, before: Progress, ahead: int, beyond: int = 0) -> tuple[Schedule, Progress]:
        """A step.

        Args:
            before: How far the window is.
            ahead: Batches of the window behind this one, as far as they are known.
            beyond: Batches of the next window whose teacher may run, as far as they are known;
                then the window ends behind those that are ahead.

        Returns:
            The step, and how far the window is behind it; or the next one, if it has begun.
        """
        number, size = before.place + 1 + ahead, self.pipeline.num_ranks
        if ahead >= self.lookahead:  # it goes on: in whole groups
            number -= number % size
        whole = self._whole(number, beyond)
        step, after = self._made(whole, before, number)
        return step, after.moved(after.place) if beyond and not ahead else after

    def _rest(self, before: Progress) -> tuple[Schedule, Progress]:
        """What is still to do for batches whose losses have run, behind the last step.

        Args:
            before: How far the window is.
        """
        if not before.place:
            return Schedule(self.pipeline, ((),) * self.pipeline.num_ranks), before
        whole, has_run = self._whole(before.place), before.done | before.early
        work = set(_work(whole)) - has_run
        due = [[a for a in own if a in work] for own in whole.ranks]
        step = self._step_of(whole, due, before.place - 1, has_run)
        return step, replace(before, early=before.early.union(*due))

    def _made(self, whole: Schedule, before: Progress, number: int) -> tuple[Schedule, Progress]:
        """The step of a place, cut out of an order of so many batches, and the progress behind."""
        place, fills = before.place, self.teacher != "now"
        walked = _Walk(whole, before, self.durations, fills=fills)
        cut, base = self._cut(walked, place, number)
        done = frozenset(action for actions in cut for action in actions)
        due = [[action for action in actions if action not in before.early] for actions in cut]
        step = self._step_of(whole, due, place, before.done)
        ends = frozenset(
            (action, end - base)
            for action, end in walked.ends.items()
            if end > base and (action in done or action not in walked.starts)
        )
        after = Progress(place + 1, before.done | done, ends, before.early - done)
        # Without the first batches, if all is done: then long windows have few kinds of steps.
        left = {action.batch for action in _work(whole) if action not in after.done}
        first = min([*left, after.place]) // self.pipeline.num_ranks * self.pipeline.num_ranks
        return step, after.moved(first)

    def _step_of(
        self,
        whole: Schedule,
        ranks: Sequence[Sequence[Action]],
        place: int,
        done: frozenset[Action],
    ) -> Schedule:
        """Actions of an order as a step, seen from the batch at a place."""
        own = [replace(a, batch=a.batch - place) for actions in ranks for a in actions]
        new = _read_by(chain.from_iterable(ranks)) - _read_by(done)
        step = assemble(self.pipeline, own, batches=sorted(batch - place for batch in new))
        return replace(step, asynchronous=True, halves=whole.halves)

    def _cut(self, walked: _Walk, place: int, number: int) -> tuple[list[list[Action]], int]:
        """What each rank does in a step, and when the next one begins for the first of them."""
        starts, ends = walked.starts, walked.ends
        if place + 1 == number:  # to the end of the window
            last = max((ends[a] for a in starts if a.batch < number), default=0)
            cut = [
                [
                    a
                    for a in actions
                    if self.teacher == "late" or a.batch < number or starts[a] < last
                ]
                for actions in walked.ranks
            ]
        elif self.name in ACROSS_STEPS:
            loss = Action(Op.LOSS, self.pipeline.loss_rank, batch=place + 1)
            cut = [[a for a in actions if starts[a] < starts[loss]] for actions in walked.ranks]
            return cut, starts[loss]
        else:
            cut = [actions[: _behind(actions, place)] for actions in walked.ranks]
        free = [max([ends[a] for a in own], default=0) for own in cut]
        return cut, min(map(max, free, walked.free))


@lru_cache(_CACHED)
def steady_window(  # noqa: PLR0913, PLR0917 - what a window is, in full
    name: str,
    pipeline: Pipeline,
    number: int,
    teacher: When = "now",
    durations: Durations = Durations(),
    split: frozenset[int] = frozenset(),
) -> Schedule:
    """A window that follows others.

    Args:
        name: Name of the order.
        pipeline: The pipeline.
        number: Batches of the window; the offsets of actions are their places in it.
        teacher: When a teacher runs.
        durations: As of :class:`WindowSteps`.
        split: As of :class:`WindowSteps`.
    """
    if pipeline.teacher is None or pipeline.num_ranks == 1 or teacher == "now":
        return window(name, pipeline, number, split=split)
    steps = WindowSteps(name, pipeline, teacher, number, durations, split)
    return steps.windows(number, _UNTIL_STEADY)[-1]


class _Walk:
    """A walk of all ranks through what is left of a window.

    Args:
        whole: An order of it.
        before: What is done.
        durations: What actions take.
        fills: Whether a rank that would wait runs a forward of the teacher. By costs: if there is
            time for it before what comes next, as far as this is known, or else by when it begins
            without a teacher. Otherwise: unless another one has made it late already.
        alone: Whether the teacher is left out.

    Attributes:
        ranks: What each rank does, in the order of the walk.
        starts: When it begins, in units.
        ends: When it ends; also of what is done, of which most has ended at 0.
        free: For each rank, when what was done ends.

    Raises:
        ScheduleError: Ranks wait for each other.
    """

    def __init__(
        self,
        whole: Schedule,
        before: Progress,
        durations: Durations,
        *,
        fills: bool,
        alone: bool = False,
    ) -> None:
        pipeline = whole.pipeline
        left_out = {Op.DATA, Op.TEACHER} if alone else {Op.DATA}
        work = {a for a in _work(whole) if a.op not in left_out} - before.done
        self._fills, self._takes = fills, durations
        self._due: Mapping[Action, int] = {}
        if fills and (durations.by_stage or durations.teacher > 1):  # others fit into any gap
            is_apart = bool(durations.by_stage)
            self._due = _Walk(whole, before, durations, fills=False, alone=is_apart).starts
        self.starts: dict[Action, int] = {}
        self.ends: dict[Action, int] = dict.fromkeys(before.done, 0) | dict(before.ends)
        self.free = [0] * pipeline.num_ranks
        for action, end in before.ends:
            rank = pipeline.rank_of(action)
            self.free[rank] = max(self.free[rank], end)
        self._needs: Mapping[Action, list[Action]] = {
            a: [need.producer for need in whole.needs[a] if need.producer.op not in left_out]
            for a in work
        }
        self.ranks: list[list[Action]] = [[] for _ in whole.ranks]
        left = [[action for action in actions if action in work] for actions in whole.ranks]
        self._times = sorted({end for _, end in before.ends})
        self._run(left, whole)

    def _run(self, left: list[list[Action]], whole: Schedule) -> None:
        """Walk on, from one of the times at which something ends to the next."""
        free, times, now = list(self.free), self._times, 0
        while any(left):
            has_begun = False
            for rank, actions in enumerate(left):
                while free[rank] <= now and (found := self._next(actions, now)):
                    actions.remove(found)
                    self.ranks[rank].append(found)
                    self.starts[found] = now
                    self.ends[found] = free[rank] = now + self._takes(found)
                    heapq.heappush(times, free[rank])
                    has_begun = True
            while not has_begun and times and times[0] <= now:
                heapq.heappop(times)
            if not has_begun and not times:
                raise ScheduleError(f"the order of a window deadlocks\n{whole}")
            now = now if has_begun else times[0]

    def _next(self, actions: Sequence[Action], now: int) -> Action | None:
        """What comes next if it can begin, or else a forward of the teacher that can."""
        by_costs = self._fills and bool(self._takes.by_stage)
        own = (a for a in actions if not by_costs or a.op is not Op.TEACHER)
        first = next(own, None)
        if first is not None and self._is_ready(first, now):
            return first
        if not self._fills:
            return None
        found = (a for a in actions if a.op is Op.TEACHER and self._is_ready(a, now))
        ahead = next(found, None)
        if first is None or ahead is None:
            return ahead
        if by_costs:
            return self._if_in_time(ahead, first, now)
        return None if now > self._due.get(first, now) else ahead

    def _if_in_time(self, ahead: Action, first: Action, now: int) -> Action | None:
        """A forward of the teacher, if it keeps nothing waiting that comes first."""
        ends = [self.ends.get(need, math.inf) for need in self._needs[first]]
        until = max(ends, default=now)
        until = self._due[first] if until == math.inf else int(until)
        if until <= now or now + self._takes(ahead) <= until:
            return ahead
        heapq.heappush(self._times, until)
        return None

    def _is_ready(self, action: Action, now: int) -> bool:
        return all(self.ends.get(need, math.inf) <= now for need in self._needs[action])


def _work(schedule: Schedule) -> Iterator[Action]:
    """Its actions that belong to a batch, without the reading of it."""
    return (a for a in schedule.actions if a.unit is not None or a.op is Op.LOSS)


def _behind(actions: Sequence[Action], place: int) -> int:
    """How many of a rank's actions come up to the last one of a batch."""
    return max((i for i, action in enumerate(actions, 1) if action.batch <= place), default=0)


def _read_by(actions: Iterable[Action]) -> set[int]:
    """The batches that first stages have read."""
    return {a.batch for a in actions if not a.stage and a.op in {Op.FORWARD, Op.TEACHER}}
