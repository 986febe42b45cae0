"""Search for cuts, micro-batches and backward halves, by simulated step time.

1. For every number of micro-batches and of stages: make cuts with evenly busy ranks.
2. Simulate each quickly, with and without halves of the backward, best bounds first.
3. Move the boundaries of the best few as long as that helps.
4. Build and simulate the schedule that will run, for the best of those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import NamedTuple

from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.planning import search
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.partition import too_few_atoms
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.workload import Workload
from lightning_tspipe.schedules.registry import ASYNCHRONOUS, steady_step
from lightning_tspipe.schedules.synthesis import estimate_step_time
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.schedules.window_steps import Durations, steady_window
from lightning_tspipe.schedules.windows import ACROSS_STEPS, window
from lightning_tspipe.schedules.zero_bubble import split_backward
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import (
    StepGraph,
    Walk,
    graph_step_time,
    steady_step_time,
)

_NUM_EXACT = 5
_FEW_EXACT = 2
_EXACT_ACTIONS = 10_000
"""Limits the time of building schedules: those of large steps take seconds each."""

_MOVED_ACTIONS = 1_000
_MOST_MOVED = 40
"""Limit the time of moving boundaries by exact simulations: one takes as the square of actions."""

_REFINED_ACTIONS = 90_000
"""Limits the time of all refinements: simulated neighbours, times actions per step."""

_CAREFUL_ACTIONS = 400
"""Small steps are simulated several times, with different policies of list scheduling."""

_NUM_PROMISING = 40
"""Number of starts that are simulated again before the best of each kind are refined."""

_QUICK = 8
"""A quick search looks at fewer layouts, by this factor."""

_NEAR = 1.05
"""Estimates this close may be reordered when the real schedule is built."""

_MAX_FOLDED = 16
"""Most ranks with two stages each: synthesising so many stages takes long."""

_ROUNDS = range(2, 10)
"""Numbers of stages on each rank that are tried for "interleaved"."""

_FOLDED_EFFORT = 4
"""Simulations of a layout with two stages per rank, whose order matters more."""

TIE = 1.01
"""Times this close count as equal; then fewer micro-batches, stages and halves are preferred."""


def plan(workload: Workload, *, thorough: bool = True) -> Plan:
    """Find the plan with the smallest simulated steady step time that fits the memory.

    Args:
        workload: The step, the devices, and what the user decided.
        thorough: Whether to search for seconds rather than for about one.

    Raises:
        PartitionError: Too few atoms, or no cut fits: names the atom and the amount.
        ConfigurationError: An impossible partition.
    """
    return _Planner(workload, share=1 if thorough else _QUICK).plan()


class Evaluator:
    """Simulates layouts of one workload; caches the actions of a step, of which many share them."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[Pipeline, frozenset[int]], StepGraph] = {}
        self.num_simulated = 0

    def estimate(self, layout: Layout, effort: int = 1) -> float:
        """Estimated seconds per steady step; from ``effort`` simulations for "tspipe"."""
        graph, costs = self._graph(layout), layout.costs
        if layout.workload.schedule == "tspipe":
            self.num_simulated += effort
            return estimate_step_time(graph, costs, effort)
        self.num_simulated += 1
        if layout.workload.window:
            return _window_seconds(graph, costs) / layout.workload.window
        return graph_step_time(graph, costs)

    def exact(self, layout: Layout) -> float:
        """Simulated seconds per steady step of the schedule that will run."""
        self.num_simulated += 1
        workload = layout.workload
        if workload.window:
            name, when = workload.schedule, workload.teacher_runs
            durations = Durations.of(name, layout.pipeline, layout.costs)
            steady = steady_window(
                name, layout.pipeline, workload.window, when, durations, layout.split
            )
            return _window_seconds(StepGraph.of(steady), layout.costs) / workload.window
        return steady_step_time(_schedule(layout), layout.costs)

    def num_actions(self, layout: Layout) -> int:
        """Number of actions in a step."""
        return len(self._graph(layout).actions)

    def _graph(self, layout: Layout) -> StepGraph:
        key = (layout.pipeline, layout.split)
        if key not in self._graphs:
            if layout.workload.schedule != "tspipe":
                schedule = _schedule(layout)
            else:  # the paper's order; what it costs decides among others
                fixed = tspipe(layout.pipeline, teacher_now=False, teacher_next=True)
                schedule = split_backward(fixed, layout.split)
            self._graphs[key] = StepGraph.of(schedule)
        return self._graphs[key]


def _schedule(layout: Layout) -> Schedule:
    """The schedule that will run."""
    if layout.workload.window:
        name, number = layout.workload.schedule, layout.workload.window
        return window(name, layout.pipeline, number, split=layout.split)
    return steady_step(layout.workload.schedule, layout.pipeline, layout.costs, layout.split)


def _window_seconds(graph: StepGraph, costs: CostTable) -> float:
    """Seconds of a window behind another one: its ranks need not begin at the same time."""
    first, second = Walk([graph] * 2, costs).step_ends
    return second - first


class _Scored(NamedTuple):
    """A layout and its step time."""

    seconds: float
    layout: Layout

    @property
    def simplicity(self) -> tuple[int, int, int, float]:
        layout = self.layout
        return layout.num_microbatches, layout.num_stages, len(layout.split), self.seconds


_seconds = attrgetter("seconds")


class _Planner:
    """The search for one plan."""

    def __init__(self, workload: Workload, *, share: int) -> None:
        self._workload, self._share = workload, share
        self._evaluator = Evaluator()

    def plan(self) -> Plan:
        found = self._simulate_starts()
        if self._workload.schedule != "sequential":
            found = self._refine_best(found)
        fastest = min(map(_seconds, found))
        finalists = sorted(found, key=lambda one: (max(one.seconds, fastest * TIE), one.simplicity))
        tried = finalists[: self._num_exact(finalists[0])]
        near = [one for one in tried if one.seconds <= fastest * _NEAR]
        moved = search.without_teacher_at_loss(near[0].layout) if self._workload.window else None
        if moved is not None:
            near.append(near[0]._replace(layout=moved))
        exact = [one._replace(seconds=self._evaluator.exact(one.layout)) for one in near]
        fastest = min(map(_seconds, exact))
        equal = [scored for scored in exact if scored.seconds <= fastest * TIE]
        best = self._refine_window(min(equal, key=attrgetter("simplicity")))
        reasons = _reasons(best.layout, best.seconds, self._evaluator.num_simulated, len(equal))
        return Plan.of(best.layout, best.seconds, "; ".join(reasons))

    def _refine_window(self, best: _Scored) -> _Scored:
        """Move boundaries by exact simulations, where a teacher fills the gaps of windows.

        The search has none ahead of its student. A few moves, since ranks wait for the plan.
        """
        workload = self._workload
        if not workload.window or workload.teacher_runs == "now" or workload.teacher is None:
            return best
        size = self._evaluator.num_actions(best.layout)
        left = min(_MOST_MOVED // self._share, (_MOVED_ACTIONS // size) ** 2)
        moves = search.neighbours(best.layout)
        while moves and left > 0:
            layout = moves.pop(0)
            if layout.excess or layout.busiest >= best.seconds:
                continue
            left -= 1
            seconds = self._evaluator.exact(layout)
            if seconds < best.seconds:
                best = _Scored(seconds, layout)
                moves = search.neighbours(layout)
        return best

    def _num_exact(self, best: _Scored) -> int:
        num_actions = self._evaluator.num_actions(best.layout)
        most = _NUM_EXACT if self._share == 1 else _FEW_EXACT
        return max(1, min(most, _EXACT_ACTIONS // num_actions))

    def _simulate_starts(self) -> list[_Scored]:
        """Good layouts for each number of micro-batches, stages and halves; best first."""
        found: list[_Scored] = []
        best, workload = math.inf, self._workload
        for space, layouts in sorted(self._starts(), key=lambda pair: pair[1][0].busiest):
            splits = workload.splits(space.num_stages)
            is_folded = space.start is not None and workload.partition == "auto"
            if is_folded:
                splits = splits[-1:]  # as many as allowed, since a unit's path is long
            for split, start in product(splits, layouts):
                layout = replace(start, split=split)
                # Moved boundaries may help a little where the bound does not rule it out.
                can_win = layout.busiest < best and layout.bound < best * _NEAR
                if not found or can_win:
                    effort = _FOLDED_EFFORT if is_folded else 1
                    seconds = self._evaluator.estimate(layout, effort)
                    best = min(best, seconds)
                    found.append(_Scored(seconds, layout))
        return self._distinct(sorted(found, key=_seconds))

    def _starts(self) -> list[tuple[search.CutSpace, list[Layout]]]:
        """The layouts of each space that fit, best bound first; spaces without one are left out."""
        spaces = self._spaces()
        # Sequentially one rank works at a time, so cuts differ in memory only.
        most = 1 if self._workload.schedule == "sequential" else search.MAX_STARTS // self._share
        starts: list[tuple[search.CutSpace, list[Layout]]] = []
        hints: dict[int, list[Layout]] = {}
        for space in spaces:
            layouts = space.starts(hints.get(space.num_stages, ()))
            hints.setdefault(space.num_stages, layouts)
            if layouts:
                starts.append((space, layouts[:most]))
        if not starts:
            raise search.does_not_fit(spaces[0].closest())
        return starts

    def _distinct(self, found: Sequence[_Scored]) -> list[_Scored]:
        """Simulate the promising ones again, and keep the best of each kind."""
        number = _NUM_PROMISING // self._share
        promising = [self._look_again(one) for one in found[:number]]
        kinds: dict[tuple[int, int, frozenset[int]], _Scored] = {}
        for one in sorted([*promising, *found[number:]], key=_seconds):
            layout = one.layout
            kind = layout.num_microbatches, layout.num_stages, layout.split
            kinds.setdefault(kind, one)
        return list(kinds.values())

    def _look_again(self, scored: _Scored) -> _Scored:
        """Estimate again with more simulations, if the step is small."""
        effort = self._effort(scored.layout)
        if effort == 1:
            return scored
        return scored._replace(seconds=self._evaluator.estimate(scored.layout, effort))

    def _effort(self, layout: Layout) -> int:
        return 1 + _CAREFUL_ACTIONS // self._evaluator.num_actions(layout)

    def _spaces(self) -> list[search.CutSpace]:
        workload = self._workload
        counts, fixed = workload.microbatch_counts(), workload.given_cuts()
        starts: list[tuple[int, tuple[int, ...] | None]]
        if fixed is not None:
            starts = [(len(fixed) - 1, fixed)]
        else:
            wanted = workload.num_stages or (1 if workload.frozen else workload.num_ranks)
            if workload.num_pieces < wanted:
                raise too_few_atoms(workload.num_pieces, wanted)
            starts = [(number, None) for number in self._stage_counts(counts[0])]
            folded = search.folded_cuts(workload, counts[0], _MAX_FOLDED // self._share)
            starts += [(len(cuts) - 1, cuts) for cuts in folded]
        return [
            search.CutSpace(workload, number, count, start)
            for number, start in starts
            for count in counts
        ]

    def _stage_counts(self, num_microbatches: int) -> list[int]:
        """Numbers of stages: one per rank, and more (folded) if the most even cut doesn't fit."""
        workload = self._workload
        num_ranks, num_pieces = workload.num_ranks, workload.num_pieces
        if workload.num_stages is not None:
            return [workload.num_stages]
        if workload.schedule in ACROSS_STEPS:
            rounds = _ROUNDS if workload.schedule == "interleaved" else (2,)
            counts = [num_ranks * each for each in rounds if num_ranks * each <= num_pieces]
            if not counts:
                raise too_few_atoms(num_pieces, 2 * num_ranks)
            return counts
        if num_pieces < num_ranks:
            return [num_pieces]
        space = search.CutSpace(workload, num_ranks, num_microbatches)
        unfolded = num_ranks == 1 or workload.schedule == ASYNCHRONOUS
        if unfolded or replace(space, start=next(space.even())).starts():
            return [num_ranks]
        folded = sorted({num_ranks + 1, 2 * num_ranks - 1, 2 * num_ranks})
        return [num_ranks, *(count for count in folded if count <= num_pieces)]

    def _refine_best(self, found: Sequence[_Scored]) -> list[_Scored]:
        """Refine the best ones while there is time; the rest does not change."""
        budget = actions = _REFINED_ACTIONS // self._share
        refined = []
        for scored in found:
            num_actions = self._evaluator.num_actions(scored.layout)
            before = self._evaluator.num_simulated
            # No refinement takes more than a third of the time.
            most = min(budget, actions // 3) // num_actions
            refined.append(self._refine(scored, most, self._effort(scored.layout)))
            budget -= num_actions * (self._evaluator.num_simulated - before)
        return refined

    def _refine(self, scored: _Scored, num_simulations: int, effort: int) -> _Scored:
        """Move boundaries as long as a simulation is faster; promising moves first."""
        best = self._look_again(scored)
        left = num_simulations
        moves = search.neighbours(best.layout)
        while moves and left > 0:
            layout = moves.pop(0)
            # What cannot win needs no simulation.
            if layout.excess or layout.busiest >= best.seconds:
                continue
            left -= effort
            seconds = self._evaluator.estimate(layout, effort)
            if seconds < best.seconds:
                best = best._replace(seconds=seconds, layout=layout)
                moves = search.neighbours(best.layout)
        return best


def _reasons(layout: Layout, seconds: float, num_simulated: int, num_equal: int) -> list[str]:
    """The reasons for a plan.

    Args:
        layout: Its layout.
        seconds: Seconds of its steady step.
        num_simulated: Number of simulations in the search.
        num_equal: Number of layouts that are as fast, including this one.
    """
    workload = layout.workload
    share = max(layout.busy) / seconds if seconds else 1.0
    found = [
        f"fastest of {num_simulated} simulations: the busiest rank works {share:.0%} of the step"
    ]
    if num_equal > 1:
        found.append(f"the simplest of {num_equal} that are equally fast, within {TIE - 1:.0%}")
    if layout.num_stages > workload.num_ranks and workload.partition == "auto":
        found.append("stages are folded over the ranks, to fit the memory or balance the load")
    if layout.costs.reduction:
        longest = max(layout.costs.reduction) * 1e3
        found.append(f"summing gradients over the replicas takes up to {longest:.1f} ms")
    smallest, largest = workload.measured_sizes
    size = min(workload.batch_sizes) // layout.num_microbatches
    if not smallest <= size <= largest:
        found.append(
            f"units of {size} samples are extrapolated from those that were measured, of "
            f"{smallest} to {largest}"
        )
    return found
