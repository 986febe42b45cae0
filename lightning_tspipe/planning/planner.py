"""Search for cuts, micro-batches and backward halves, by simulated step time.

1. For every number of micro-batches and of stages: make cuts with evenly busy ranks.
2. Simulate each quickly, with and without halves of the backward, best bounds first.
3. Move the boundaries of the best few as long as that helps.
4. Build and simulate the schedule that will run, for the best of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_tspipe.planning.constraints import Constraints
from lightning_tspipe.planning.evaluation import Evaluator
from lightning_tspipe.planning.failures import does_not_fit
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.partition import partition as cut_evenly
from lightning_tspipe.planning.partition import too_few_atoms
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.reason import TIE, as_plan
from lightning_tspipe.planning.search import (
    MAX_STARTS,
    CutSpace,
    atom_seconds,
    excess_and_bound,
    folded_cuts,
    joined_atoms,
)
from lightning_tspipe.planning.workload import Workload
from lightning_tspipe.schedules.registry import ASYNCHRONOUS

_NUM_EXACT = 5
_FEW_EXACT = 2
_EXACT_ACTIONS = 10_000
"""Limits the time of building schedules: those of large steps take seconds each."""

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

_SEARCHED = 2
"""Up to this number of ranks, contiguous cuts are searched so well that folding is not."""

_MAX_FOLDED = 16
"""Most ranks with two stages each: synthesising so many stages takes long."""

_FOLDED_EFFORT = 4
"""Simulations of a layout with two stages per rank, whose order matters more."""

_FOLDING = ("tspipe", "gpipe")
"""Schedules that are faster with evenly busy ranks."""


def plan(workload: Workload, constraints: Constraints, *, thorough: bool = True) -> Plan:
    """Find the plan with the smallest simulated steady step time that fits the memory.

    Args:
        workload: The step, and the devices.
        constraints: Decisions of the user.
        thorough: Whether to search for seconds rather than for about one.

    Raises:
        PartitionError: Too few atoms, or no cut fits: names the atom and the amount.
        ConfigurationError: An impossible partition.
    """
    return _Planner(workload, constraints, share=1 if thorough else _QUICK).plan()


@dataclass(frozen=True)
class _Scored:
    """A layout and its step time."""

    seconds: float
    layout: Layout
    space: CutSpace


class _Planner:
    """The search for one plan."""

    def __init__(self, workload: Workload, constraints: Constraints, *, share: int) -> None:
        self._workload, self._constraints = workload, constraints
        self._cuts = constraints.cuts(workload)
        self._most_exact = _NUM_EXACT if share == 1 else _FEW_EXACT
        self._num_promising = _NUM_PROMISING // share
        self._refined_actions = _REFINED_ACTIONS // share
        self._num_starts = MAX_STARTS // share
        self._most_folded = _MAX_FOLDED // share
        self._evaluator = Evaluator(constraints.schedule, ahead=constraints.ahead)

    def plan(self) -> Plan:
        found = self._simulate_starts()
        if self._constraints.schedule != "sequential":
            found = self._refine_best(found)
        fastest = min(map(_seconds, found))
        finalists = sorted(
            found, key=lambda one: (max(one.seconds, fastest * TIE), _simplicity(one))
        )
        exact = [
            replace(scored, seconds=self._evaluator.exact(scored.layout))
            for scored in finalists[: self._num_exact(finalists[0])]
            if scored.seconds <= fastest * _NEAR
        ]
        fastest = min(scored.seconds for scored in exact)
        equal = [scored for scored in exact if scored.seconds <= fastest * TIE]
        best = min(equal, key=_simplicity)
        return as_plan(
            best.layout,
            best.seconds,
            self._constraints,
            num_simulated=self._evaluator.num_simulated,
            num_equal=len(equal),
        )

    def _num_exact(self, best: _Scored) -> int:
        num_actions = self._evaluator.num_actions(best.layout)
        return max(1, min(self._most_exact, _EXACT_ACTIONS // num_actions))

    def _simulate_starts(self) -> list[_Scored]:
        """Good layouts for each number of micro-batches, stages and halves; best first."""
        spaces = list(self._spaces())
        starts = self._starts(spaces)
        if not starts:
            raise does_not_fit(spaces[0].closest())
        if self._constraints.schedule == "sequential":
            # One rank works at a time, so cuts differ in memory only: take the most even one.
            starts = [(space, layouts[:1]) for space, layouts in starts]
        starts = [(space, layouts[: self._num_starts]) for space, layouts in starts]
        found: list[_Scored] = []
        best = math.inf
        for space, layouts in sorted(starts, key=lambda pair: max(pair[1][0].busy)):
            splits = self._constraints.splits(self._workload, space.num_stages)
            if space.start is not None:
                splits = splits[-1:]  # as many as allowed, since a unit's path is long
            for split in splits:
                for layout in (replace(start, split=split) for start in layouts):
                    if not found or self._can_win(layout, best):
                        effort = 1 if space.start is None else _FOLDED_EFFORT
                        seconds = self._evaluator.estimate(layout, effort)
                        best = min(best, seconds)
                        found.append(_Scored(seconds, layout, space))
        return self._distinct(sorted(found, key=_seconds))

    def _can_win(self, layout: Layout, best: float) -> bool:
        if max(layout.busy) >= best:
            return False
        # Moved boundaries may help a little here.
        return self._evaluator.bound(layout) < best * _NEAR

    def _distinct(self, found: Sequence[_Scored]) -> list[_Scored]:
        """Simulate the promising ones again, and keep the best of each kind."""
        promising = [self._look_again(one) for one in found[: self._num_promising]]
        kinds: dict[tuple[int, int, frozenset[int]], _Scored] = {}
        for one in sorted([*promising, *found[self._num_promising :]], key=_seconds):
            layout = one.layout
            kind = layout.num_microbatches, layout.cuts.num_stages, layout.split
            kinds.setdefault(kind, one)
        return list(kinds.values())

    def _look_again(self, scored: _Scored) -> _Scored:
        """Estimate again with more simulations, if the step is small."""
        effort = self._effort(scored.layout)
        if effort == 1:
            return scored
        return replace(scored, seconds=self._evaluator.estimate(scored.layout, effort))

    def _effort(self, layout: Layout) -> int:
        return 1 + _CAREFUL_ACTIONS // self._evaluator.num_actions(layout)

    @staticmethod
    def _starts(spaces: Sequence[CutSpace]) -> list[tuple[CutSpace, list[Layout]]]:
        """The layouts of each space that fit; spaces without one are left out."""
        found = []
        hints: dict[int, list[Layout]] = {}
        for space in spaces:
            layouts = space.starts(hints.get(space.num_stages, ()))
            hints.setdefault(space.num_stages, layouts)
            if layouts:
                found.append((space, layouts))
        return found

    def _spaces(self) -> Iterator[CutSpace]:
        workload, fixed = self._workload, self._cuts
        counts = self._constraints.microbatch_counts(workload)
        if fixed is not None:
            yield from (CutSpace(workload, len(fixed) - 1, n, fixed) for n in counts)
            return
        num_pieces = workload.student.num_atoms - len(joined_atoms(workload))
        wanted = self._constraints.num_stages or (1 if workload.frozen else workload.num_ranks)
        if num_pieces < wanted:
            raise too_few_atoms(num_pieces, wanted)
        for num_stages in self._stage_counts(num_pieces, counts[0]):
            yield from (CutSpace(workload, num_stages, count) for count in counts)
        for cuts in self._folded(counts[0]):
            num_stages = len(cuts) - 1
            yield from (CutSpace(workload, num_stages, count, start=cuts) for count in counts)

    def _folded(self, num_microbatches: int) -> list[tuple[int, ...]]:
        """Cuts with two stages on some ranks, if these may be faster."""
        constraints, num_ranks = self._constraints, self._workload.num_ranks
        is_free = constraints.schedule in _FOLDING and constraints.num_stages is None
        if not is_free or not _SEARCHED < num_ranks <= self._most_folded:
            return []
        return folded_cuts(self._workload, num_microbatches)

    def _stage_counts(self, num_pieces: int, num_microbatches: int) -> list[int]:
        """Numbers of stages: one per rank, and more (folded) if the most even cut doesn't fit."""
        workload = self._workload
        num_ranks = workload.num_ranks
        if self._constraints.num_stages is not None:
            return [self._constraints.num_stages]
        if num_pieces < num_ranks:
            return [num_pieces]
        even = cut_evenly(
            atom_seconds(workload, num_microbatches), num_ranks, joined=joined_atoms(workload)
        )
        unlimited = CutSpace(workload, num_ranks, num_microbatches, even)
        if num_ranks == 1 or self._constraints.schedule == ASYNCHRONOUS or unlimited.starts():
            return [num_ranks]
        folded = sorted({num_ranks + 1, 2 * num_ranks - 1, 2 * num_ranks})
        return [num_ranks, *(count for count in folded if count <= num_pieces)]

    def _refine_best(self, found: Sequence[_Scored]) -> list[_Scored]:
        """Refine the best ones while there is time; the rest does not change."""
        budget = self._refined_actions
        refined = []
        for scored in found:
            num_actions = self._evaluator.num_actions(scored.layout)
            before = self._evaluator.num_simulated
            # No refinement takes more than a third of the time.
            most = min(budget, self._refined_actions // 3) // num_actions
            refined.append(self._refine(scored, most, self._effort(scored.layout)))
            budget -= num_actions * (self._evaluator.num_simulated - before)
        return refined

    def _refine(self, scored: _Scored, num_simulations: int, effort: int) -> _Scored:
        """Move boundaries as long as a simulation is faster; promising moves first."""
        best = self._look_again(scored)
        left = num_simulations
        moves = self._moves(best)
        while moves and left > 0:
            layout = moves.pop(0)
            # What cannot win needs no simulation.
            if not layout.fits or max(layout.busy) >= best.seconds:
                continue
            left -= effort
            seconds = self._evaluator.estimate(layout, effort)
            if seconds < best.seconds:
                best = replace(best, seconds=seconds, layout=layout)
                moves = self._moves(best)
        return best

    def _moves(self, scored: _Scored) -> list[Layout]:
        return sorted(scored.space.neighbours(scored.layout), key=excess_and_bound)


def _seconds(scored: _Scored) -> float:
    return scored.seconds


def _simplicity(scored: _Scored) -> tuple[int, int, int, float]:
    layout = scored.layout
    return layout.num_microbatches, layout.cuts.num_stages, len(layout.split), scored.seconds
