"""Timelines: the actions of each rank over time, simulated or measured.

Over the steady window (all steps but the first and the last) the drawing of a step shows::

    rank 0 |F0F1I1I0W1W0t0t1|      capital letters: this batch
    rank 1 |t1B1──B0──F0F1t0|      t: teacher forward of the next batch; spaces: idle

In asynchronous schedules the number is that of the batch, followed by the version of the weights
that it has read, if there is room::

    rank 1 |F5v3~1B4v4────F6v4~1B5v5────|   v3~1: version 3, predicted one update ahead
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.plain import Saved


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank.

    Attributes:
        rank: The rank that ran it.
        action: The action as text (``"2T0+1"``).
        op: Letter of its op.
        step: The step that ran it, counted from 0.
        start: Start in seconds, on a clock that all ranks share.
        end: End in seconds.
        version: Number of updates of the weights that it read; None if all actions of a step read
            the same.
        predicted: Number of updates that were predicted in addition.
    """

    rank: int
    action: str
    op: str
    step: int
    start: float
    end: float
    version: int | None = None
    predicted: int = 0

    @property
    def read(self) -> str:
        """The weights it read: ``v3``, or ``v3~2`` with two predicted updates; '' if unknown."""
        if self.version is None:
            return ""
        return f"v{self.version}" + f"~{self.predicted}" * (self.predicted > 0)

    @property
    def batch(self) -> int:
        """The number of its batch."""
        return self.step + Action.parse(self.action).batch


@dataclass(frozen=True, slots=True)
class Pause:
    """Time between two actions, with a recorded reason.

    Attributes:
        rank: The rank.
        reason: ``receive`` (waiting for a message), ``send`` (sending one), ``load`` (waiting for
            the loader), ``reduce`` (waiting for gradients of other replicas) or ``clip`` (gradient
            clipping by the norm over all ranks).
        start: Start in seconds, on the clock of the spans.
        end: End in seconds.
    """

    rank: int
    reason: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline(Saved):
    """Spans of several ranks over several steps.

    Attributes:
        spans: In any order; those of one rank don't overlap.
        num_ranks: Ranks of the pipeline, including those without spans.
        pipeline: The pipeline; None if unknown.
        pauses: Pauses that a run recorded between the spans; none in a simulation.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    pipeline: Pipeline | None = None
    pauses: tuple[Pause, ...] = ()
    _origin = "timeline", "the callback PipelineTimeline writes timeline.json"

    @property
    def start(self) -> float:
        """Start of the first action, in seconds."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def end(self) -> float:
        """End of the last action, in seconds."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have spans, ascending."""
        return tuple(sorted({span.step for span in self.spans}))

    @property
    def num_steady_steps(self) -> int:
        """Steps within :attr:`windows`; at least 1."""
        steady = len(self.steps) - 2
        return steady if steady > 0 else max(1, len(self.steps))

    @property
    def steady_start(self) -> float:
        """Start of the second step, the first steady one, on the first rank; in seconds."""
        first = self.steps[:2][-1:]
        return min((span.start for span in self.spans if span.step in first), default=0.0)

    @cached_property
    def windows(self) -> tuple[tuple[float, float], ...]:
        """Each rank's steady window: from the end of its first step to that of its last but one.

        Ranks run the same step at different times, so each has a window of its own. With fewer than
        three steps there is no steady state, and the window is the whole timeline.
        """
        if len(self.steps) < 3:
            return ((self.start, self.end),) * self.num_ranks
        first, last = self.steps[0], self.steps[-2]
        ranks = range(self.num_ranks)
        return tuple((self._step_end(rank, first), self._step_end(rank, last)) for rank in ranks)

    @property
    def step_time(self) -> float:
        """Seconds per step in the steady window, of the slowest rank."""
        return max(end - start for start, end in self.windows) / self.num_steady_steps

    def busy(self, rank: int) -> float:
        """Seconds that ``rank`` works within its steady window."""
        start, end = self.windows[rank]
        within = (min(span.end, end) - max(span.start, start) for span in self.of_rank(rank))
        return sum(max(0.0, seconds) for seconds in within)

    @property
    def bubble_ratio(self) -> float:
        """Share of the ranks' time in the steady window in which they wait; 0 is ideal."""
        total = sum(end - start for start, end in self.windows)
        if total <= 0:
            return 0.0
        return max(0.0, 1.0 - sum(map(self.busy, range(self.num_ranks))) / total)

    def figures(self) -> dict[str, float]:
        """Metrics of the steady steps, for a logger.

        Returns:
            ``bubble_ratio`` and ``step_ms``; ``rank0_idle_ms`` (per step) of each rank; of each
            stage ``stage0_forward_ms``, ``stage0_teacher_ms`` and ``stage0_backward_ms``, the mean
            of one unit. A backward in two halves counts as their sum.
        """
        found = {"bubble_ratio": self.bubble_ratio, "step_ms": self.step_time * 1e3}
        for rank, (start, end) in enumerate(self.windows):
            idle = (end - start - self.busy(rank)) / self.num_steady_steps
            found[f"rank{rank}_idle_ms"] = max(0.0, idle) * 1e3
        steady = self.steps[1:-1] or self.steps
        durations: dict[tuple[int, str], list[float]] = {}
        for span in self.spans:
            if not Op(span.op).is_rank_wide and span.step in steady:
                key = (Action.parse(span.action).stage, span.op)
                durations.setdefault(key, []).append(span.end - span.start)
        for (stage, op), seconds in sorted(durations.items()):
            kind = Op(op).name.lower().rpartition("_")[2]  # of both halves, "backward"
            name = f"stage{stage}_{kind}_ms"
            found[name] = found.get(name, 0.0) + fmean(seconds) * 1e3
        return found

    def between(self, first: int, last: int) -> Timeline:
        """The part with the steps ``first`` to ``last``, inclusive."""
        kept = tuple(span for span in self.spans if first <= span.step <= last)
        return Timeline(kept, self.num_ranks, self.pipeline, self.pauses)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank, in their order."""
        return self._by_rank.get(rank, ())

    def draw(self, width: int = 100, part: tuple[float, float] | None = None) -> str:
        """Draw for a terminal, one line per rank.

        Args:
            width: Columns of the time axis.
            part: Start and end in seconds; None: everything. See :func:`aligned`.
        """
        first, last = part or (self.start, self.end)
        scale = width / (last - first) if last > first else 0.0

        def column(time: float) -> int:
            return min(max(round((time - first) * scale), 0), width)

        lines = []
        for rank in range(self.num_ranks):
            cells = [" "] * width
            for span in self.of_rank(rank):
                left, right = column(span.start), column(span.end)
                cells[left:right] = _cell(span, right - left)
            lines.append(f"rank {rank} |{''.join(cells)}|")
        return "\n".join(lines)

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Span, ...]]:
        spans = sorted(self.spans, key=lambda span: span.start)
        ranks = {span.rank for span in spans}
        return {rank: tuple(span for span in spans if span.rank == rank) for rank in ranks}

    def _step_end(self, rank: int, step: int) -> float:
        ends = (span.end for span in self.of_rank(rank) if span.step <= step)
        return max(ends, default=self.start)


def aligned(timelines: Iterable[Timeline]) -> list[tuple[float, float]]:
    """Start and end of each timeline's part to show, so that all have the same axis.

    All parts are equally long, and the first steady step begins at the same place in each.
    """
    timelines = list(timelines)
    before = max((each.steady_start - each.start for each in timelines), default=0.0)
    after = max((each.end - each.steady_start for each in timelines), default=0.0)
    return [(each.steady_start - before, each.steady_start + after) for each in timelines]


def _cell(span: Span, width: int) -> list[str]:
    """``width`` columns for one action, with as much of its label as fits."""
    action = Action.parse(span.action)
    letter = span.op.lower() if action.batch and not span.read else span.op
    unit = "" if action.unit is None else str(action.unit)
    number = str(span.batch) if span.read else unit
    labels = (letter + number + span.read, letter + number, letter)
    label = next((label for label in labels if len(label) <= width), letter)
    return list(label.ljust(width, "─")[:width])
