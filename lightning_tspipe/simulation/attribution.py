"""Causes of idle time: every moment between two actions is attributed to one cause.

A gap before an action that another rank's work must reach first falls into two::

    rank 1 | 1F0 ──────┤                      producer: ends at a
    rank 0 | 0O ├ waiting for 1F0 │ transfer ├ 0L
                                  a

A recorded run also has pauses, which explain the rest of a gap; what they don't cover is attributed
to the Trainer. A simulation has only waiting and transfers, unless gradients are summed over
replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import depends_on
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.simulation.timeline import Pause, Span, Timeline


class Cause(Enum):
    """Causes of idle time; the value is the printed name.

    - ``WAITING``: for an action of another rank, until it ended.
    - ``TRANSFER``: for its result in transit, or while the rank itself sends something.
    - ``LOADER``: for the next batch of the user's loader.
    - ``TRAINER``: hooks, loggers, progress bars and loops of Lightning, and the runtime's own work
      between two actions.
    - ``OPTIMIZER``: between the last gradient and the optimizer's step, where gradients are clipped
      by their norm over all ranks or summed over replicas.
    """

    WAITING = "waiting"
    TRANSFER = "transfer"
    LOADER = "loader"
    TRAINER = "Lightning"
    OPTIMIZER = "optimizer"


_CAUSES = {
    "send": Cause.TRANSFER,
    "receive": Cause.TRANSFER,
    "load": Cause.LOADER,
    "clip": Cause.OPTIMIZER,
    "reduce": Cause.OPTIMIZER,
}
_REASONS = {Op.DATA: "load", Op.OPTIMIZER: "reduce"}
"""Why a rank waits before these actions, where pauses were not recorded."""
_LEAST_PRINTED = 5e-5
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Idle:
    """An interval in which a rank ran no action.

    Attributes:
        rank: The rank.
        start: Start in seconds.
        end: End in seconds.
        cause: Cause of the idle time.
        awaited: The other rank's action that it waited for, if that is the cause.
    """

    rank: int
    start: float
    end: float
    cause: Cause
    awaited: Span | None = None

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start

    def __str__(self) -> str:
        if self.awaited is None:
            return self.cause.value
        return f"waiting for {self.awaited.action} of rank {self.awaited.rank}"


@dataclass(frozen=True)
class Attribution:
    """The idle time of all ranks in their steady windows.

    Attributes:
        idle: All intervals, rank by rank, in the order of time.
        num_steps: Steps in the windows.
        seconds_per_step: For each rank, the length of its window divided by the steps.
    """

    idle: tuple[Idle, ...]
    num_steps: int
    seconds_per_step: tuple[float, ...]

    def seconds(self, rank: int, cause: Cause | None = None) -> float:
        """Idle seconds per step of one rank; None: of all causes together."""
        idle = (i for i in self.idle if i.rank == rank and cause in {None, i.cause})
        return sum(each.seconds for each in idle) / self.num_steps

    def share(self, rank: int, cause: Cause | None = None) -> float:
        """Idle time as a share of the rank's time."""
        whole = self.seconds_per_step[rank]
        return self.seconds(rank, cause) / whole if whole > 0 else 0.0

    def awaited(self, rank: int, most: int = 3) -> tuple[tuple[Span, float], ...]:
        """The actions that ``rank`` waited for longest.

        Returns:
            For each action one span as an example, and seconds per step; the longest first.
        """
        found: dict[tuple[int, str], tuple[Span, float]] = {}
        for idle in self.idle:
            if idle.rank == rank and idle.awaited is not None:
                key = (idle.awaited.rank, idle.awaited.action)
                _, before = found.get(key, (idle.awaited, 0.0))
                found[key] = (idle.awaited, before + idle.seconds / self.num_steps)
        return tuple(sorted(found.values(), key=lambda item: -item[1])[:most])

    def __str__(self) -> str:
        rows = [["idle, ms per step", *(cause.value for cause in Cause), "together"]]
        waits = []
        for rank in range(len(self.seconds_per_step)):
            rows.append([f"rank {rank}", *(self._cell(rank, cause) for cause in (*Cause, None))])
            longest = ", ".join(
                f"{span.action} of rank {span.rank} ({seconds * 1e3:.1f} ms)"
                for span, seconds in self.awaited(rank)
            )
            if longest:
                waits.append(f"rank {rank} waits longest for {longest}")
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        return "\n".join(lines + waits)

    def _cell(self, rank: int, cause: Cause | None) -> str:
        seconds = self.seconds(rank, cause)
        if seconds < _LEAST_PRINTED:
            return "-"
        return f"{seconds * 1e3:.1f} {self.share(rank, cause):4.0%}"


def attribute(timeline: Timeline, pipeline: Pipeline | None = None) -> Attribution:
    """Find the cause of every idle moment of every rank, within its steady window.

    Args:
        timeline: A simulated or measured timeline.
        pipeline: Its pipeline; None: the one that the timeline contains.

    Raises:
        ConfigurationError: The pipeline is unknown, or has another number of ranks.
    """
    pipeline = pipeline or timeline.pipeline
    if pipeline is None:
        raise ConfigurationError(
            "the timeline doesn't contain its pipeline, so it is unknown who waits for whom: give "
            "its plan too (--plan plan.json)"
        )
    if pipeline.num_ranks != timeline.num_ranks:
        raise ConfigurationError(
            f"a pipeline of {pipeline.num_ranks} ranks for a timeline of {timeline.num_ranks}"
        )
    num_steps = timeline.num_steady_steps
    walk = _Walk(timeline, pipeline)
    idle = tuple(each for rank in range(timeline.num_ranks) for each in walk.idle(rank))
    seconds = tuple((end - start) / num_steps for start, end in timeline.windows)
    return Attribution(idle, num_steps, seconds)


class _Walk:
    """Walks through the gaps of each rank."""

    def __init__(self, timeline: Timeline, pipeline: Pipeline) -> None:
        self._timeline = timeline
        self._pipeline = pipeline
        self._pauses: dict[int, list[Pause]] = {}
        for pause in sorted(timeline.pauses, key=lambda pause: pause.start):
            self._pauses.setdefault(pause.rank, []).append(pause)
        spans = sorted(timeline.spans, key=lambda span: span.end)
        self._actions = {text: Action.parse(text) for text in {span.action for span in spans}}
        halves = (a for a in self._actions.values() if a.op is Op.INPUT_BACKWARD)
        self._split = frozenset(action.stage for action in halves)
        # Of an action with several spans (a loss and its backward), the last.
        self._spans = {(span.step, self._actions[span.action]): span for span in spans}
        self._last = spans[-1] if spans else None

    def idle(self, rank: int) -> Iterator[Idle]:
        """The intervals of a rank's idle time, within its steady window."""
        first, last = self._timeline.windows[rank]
        reached = self._timeline.start
        for span in (*self._timeline.of_rank(rank), None):  # None: the end of the recording
            start, end = max(reached, first), min(last if span is None else span.start, last)
            if start < end:
                yield from (i for i in self._gap(rank, start, end, span) if i.seconds > 0)
            reached = max(reached, start if span is None else span.end)

    def _gap(self, rank: int, start: float, end: float, before: Span | None) -> Iterator[Idle]:
        """Causes of a gap that ends with the action ``before``: the Trainer, but for pauses."""
        reached = start
        awaited = self._awaited(rank, before)
        for pause in self._pauses_in(rank, start, end, before, awaited):
            first, last = max(pause.start, reached), min(pause.end, end)
            if first >= last:
                continue
            yield Idle(rank, reached, first, Cause.TRAINER)
            reached = first
            if pause.reason == "receive" and awaited is not None:
                reached = min(max(awaited.end, first), last)
                yield Idle(rank, first, reached, Cause.WAITING, awaited)
            yield Idle(rank, reached, last, _CAUSES.get(pause.reason, Cause.TRAINER))
            reached = last
        yield Idle(rank, reached, end, Cause.TRAINER)

    def _pauses_in(
        self, rank: int, start: float, end: float, before: Span | None, awaited: Span | None
    ) -> list[Pause]:
        """The pauses that were recorded; else one that explains the gap before an action."""
        if self._pauses and before is not None:
            return self._pauses.get(rank, [])
        op = None if before is None else Op(before.op)
        if op in _REASONS:
            return [Pause(rank, _REASONS[op], start, end)]
        if awaited is None:
            return []
        # Behind what the effects wait for, nothing is sent.
        return [Pause(rank, "receive", start, awaited.end if op is Op.EFFECTS else end)]

    def _awaited(self, rank: int, span: Span | None) -> Span | None:
        """The last span to end among those that ``span`` needs from other ranks.

        At the end of a recording, a rank waits for the last of all actions.
        """
        if span is None:
            return self._last if self._last is not None and self._last.rank != rank else None
        found = [self._find(span.step, need) for need in self._needs(self._actions[span.action])]
        others = [each for each in found if each is not None and each.rank != rank]
        return max(others, key=lambda each: each.end, default=None)

    def _needs(self, action: Action) -> list[Action]:
        if action.op is Op.EFFECTS:
            # They read the metadata of the batch, which the data rank sends to the others.
            return [Action(Op.DATA, self._pipeline.data_rank)]
        return [need.producer for need in depends_on(action, self._pipeline, self._split)]

    def _find(self, step: int, action: Action) -> Span | None:
        """The span of an action that the given step needs."""
        here = self._spans.get((step, action))
        if here is not None:
            return here
        if action.batch == 0:
            return self._spans.get((step - 1, replace(action, batch=1)))
        # A run reads the next batch along with this one.
        return self._spans.get((step, replace(action, batch=0))) if action.op is Op.DATA else None
