"""Candidate cuts for the planner: balanced ones to start from, and their neighbours.

No schedule is faster than its busiest rank, so cuts are tried in the order of that bound, and those
whose bound exceeds the best time so far are never simulated::

    bound      10    10    11    12    14   ...
    simulated  13    12    12    skipped: 12 is reached already
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from operator import attrgetter, sub

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.partition import Chain
from lightning_tspipe.planning.placement import Cuts, default_ranks
from lightning_tspipe.planning.table import megabytes
from lightning_tspipe.planning.workload import Workload

_MAX_ENUMERATED = 10_000
"""Most cuts of which all are priced; otherwise the search starts from balanced ones."""

MAX_STARTS = 100
"""Most layouts that a space yields: those with the best bounds."""

_MAX_CLIMBED = 16
"""Most stages whose boundaries are moved before the first simulation, which takes long."""

_UNEVEN = 1.02
"""Imbalance of the ranks above which two stages per rank are considered."""

_SEARCHED = 2
"""Up to this number of ranks, contiguous cuts are searched so well that folding is not."""

_FOLDING = ("tspipe", "gpipe")
"""Schedules that are faster with evenly busy ranks."""

_STRIDES = (1, -1, 2, -2, 4, -4)

_REMEDY = "Use more devices, smaller batches or a smaller network, or raise the limit"


@dataclass(frozen=True)
class CutSpace:
    """All cuts for a number of stages and micro-batches.

    Attributes:
        workload: The step to cut.
        num_stages: Number of student stages.
        num_microbatches: Micro-batches per call; the balance depends on them slightly.
        start: The student's cuts to start from, if they are known.
    """

    workload: Workload
    num_stages: int
    num_microbatches: int
    start: Cuts | None = None

    def starts(self, hints: Sequence[Layout] = ()) -> list[Layout]:
        """Layouts that fit the memory, best bound first.

        Args:
            hints: Good layouts for another number of micro-batches, which replace a search.
        """
        candidates = self._candidates(hints)
        layouts = {(one.student_cuts, one.teacher_bounds): one for one in candidates}
        fitting = (layout for layout in layouts.values() if not layout.excess)
        return sorted(fitting, key=attrgetter("busiest"))[:MAX_STARTS]

    def balanced(self) -> Layout:
        """The most even layout; it may not fit."""
        return self._optimum() or self._with_teacher(next(self.even()))

    def closest(self) -> Layout:
        """A layout that exceeds the memory as little as possible."""
        if self.start is not None:
            return self._with_teacher(self.start)
        return min(self._climbed(), key=attrgetter("excess_and_bound"))

    def _with_teacher(self, student: Cuts) -> Layout:
        return with_teacher(Layout(self.workload, student, self.num_microbatches))

    def _candidates(self, hints: Sequence[Layout]) -> Iterator[Layout]:
        workload = self.workload
        if self.start is not None:
            yield self._with_teacher(self.start)
        elif self._is_small:
            for inner in combinations(workload.positions, self.num_stages - 1):
                yield self._with_teacher((0, *inner, workload.student.num_atoms))
        elif hints:
            for hint in hints:
                yield replace(hint, num_microbatches=self.num_microbatches)
        else:
            best = self._optimum()
            if best is not None:
                yield best
            if best is None or self.num_stages <= _MAX_CLIMBED // 2:
                yield from self._climbed()

    @property
    def _is_small(self) -> bool:
        # For each cut of the student, a teacher that is cut on its own must be balanced anew.
        price = 1 if self.workload.independent_teacher is None else 10
        num_cuts = math.comb(len(self.workload.positions), self.num_stages - 1)
        return num_cuts * price <= _MAX_ENUMERATED

    def _optimum(self) -> Layout | None:
        """The exact optimum, where each rank has one stage and the teacher is paired; else None."""
        workload = self.workload
        if self.num_stages > workload.num_ranks or workload.independent_teacher is not None:
            return None
        seconds, joined = atom_seconds(workload, self.num_microbatches), workload.joined
        speeds = self._of_stages(workload.ranks.speeds)
        chain = Chain(
            seconds, self.num_stages, loads=self._loads, speeds=speeds, fits=self._fits,
            joined=joined,
        )  # fmt: skip
        try:
            return Layout(workload, chain.cut(), self.num_microbatches)
        except PartitionError:
            return None

    def _fits(self, start: int, stop: int, stage: int) -> bool:
        """Whether the rank of ``stage`` can hold these atoms, and no others."""
        workload = self.workload
        state, rank = workload.state_sums[stop] - workload.state_sums[start], self._ranks[stage]
        state += workload.loss_state_bytes if rank == LOSS_RANK else 0.0
        if round(state) > workload.state_limit:
            return False
        limit = workload.memory_limits[rank]
        if math.isinf(limit):
            return True
        kept = workload.activation_sums[stop] - workload.activation_sums[start]
        if start:
            received = workload.student.atoms[start - 1].output_bytes_per_sample
            kept += received * sum(workload.samples())
        again = workload.recompute_bytes(start, stop, self.num_microbatches)
        if rank == LOSS_RANK:
            again = max(again, workload.loss_bytes) + workload.loss_trainable_bytes
        kept += again
        return round(state + kept) <= limit

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        workload = self.workload
        return default_ranks(self.num_stages, workload.num_ranks, workload.schedule)

    def _of_stages(self, by_rank: Sequence[float]) -> list[float]:
        """Values of the ranks, by stage."""
        return [by_rank[rank] for rank in self._ranks]

    @property
    def _loads(self) -> list[float]:
        """The loss, on the stages of its rank."""
        each = self.workload.loss_seconds / max(1, self._ranks.count(LOSS_RANK))
        return [each * (rank == LOSS_RANK) for rank in self._ranks]

    def _climbed(self) -> list[Layout]:
        """Local optima of the bound, within the limits if possible."""
        starts = [self._with_teacher(cuts) for cuts in dict.fromkeys(self.even())]
        return starts if self.num_stages > _MAX_CLIMBED else list(map(_climb, starts))

    def even(self) -> Iterator[Cuts]:
        """Cuts whose stages take equally long, and cuts that fill the memories equally."""
        workload = self.workload
        seconds = atom_seconds(workload, self.num_microbatches)
        states = [stop - start for start, stop in pairwise(workload.state_sums)]
        limits = workload.memory_limits
        sizes = limits if all(map(math.isfinite, limits)) else [1.0] * workload.num_ranks
        for costs, rates, loads in (
            (seconds, workload.ranks.speeds, self._loads), (states, sizes, ()),
        ):  # fmt: skip
            speeds, joined = self._of_stages(rates), workload.joined
            yield Chain(costs, self.num_stages, loads=loads, speeds=speeds, joined=joined).cut()


def neighbours(layout: Layout) -> list[Layout]:
    """Layouts with one boundary moved a little, the best first."""
    workload, bounds = layout.workload, layout.teacher_bounds
    found = []
    if workload.partition == "auto":
        for student in _moved(layout.student_cuts, workload.positions, gap=1):
            found.append(replace(layout, student_cuts=student))
            if bounds and workload.num_ranks == 2:
                # With more ranks too slow; there the teacher's own moves follow.
                found.append(with_teacher(found[-1]))
    teacher = workload.independent_teacher
    if teacher is not None:  # the ends of its chain make empty parts
        positions = [n for n in range(teacher.num_atoms + 1) if n - 1 not in teacher.joined]
        moves = _moved(bounds, positions, gap=0)
        found += [replace(layout, teacher_bounds=moved) for moved in moves]
    return sorted(found, key=attrgetter("excess_and_bound"))


def _climb(best: Layout) -> Layout:
    """Move to the best neighbour as long as one is better."""
    while True:
        better = next(iter(neighbours(best)), best)
        if better.excess_and_bound >= best.excess_and_bound:
            return best
        best = better


def with_teacher(layout: Layout) -> Layout:
    """Cut an independent teacher so that the ranks are evenly busy, given the student's cuts."""
    workload, teacher = layout.workload, layout.workload.independent_teacher
    if teacher is None:
        return layout
    own = Layout(workload.alone, layout.student_cuts, layout.num_microbatches)
    sums = workload.units(layout.num_microbatches)["teacher"]
    num_units = workload.num_calls[1] * layout.num_microbatches
    room = map(sub, workload.memory_limits, own.memory_bytes)
    states = zip(own.state_bytes, room, strict=True)
    free = [min(workload.state_limit - state, left) for state, left in states]
    try:
        bounds = Chain(
            [num_units * (b - a) for a, b in pairwise(sums)],
            workload.num_ranks,
            memory=[b - a for a, b in pairwise(workload.teacher_sums)],
            memory_limits=free[::-1],
            loads=own.busy[::-1],
            speeds=workload.ranks.speeds[::-1],
            joined=teacher.joined,
            allow_empty=True,
        ).cut()
    except PartitionError:
        # The student alone is too large for a rank, or leaves too little: see ``excess``.
        bounds = (*(0,) * workload.num_ranks, teacher.num_atoms)
    return replace(layout, teacher_bounds=bounds)


def without_teacher_at_loss(layout: Layout) -> Layout | None:
    """The same, but that the rank of the loss has nothing of an independent teacher.

    The losses of a window follow each other on one rank, from where the pipeline is filled until it
    drains. While the rank is as busy as others over all, a teacher between its losses makes the
    window longer.

    Returns:
        The layout, or None if nothing changes or it doesn't fit.
    """
    workload, bounds = layout.workload, list(layout.teacher_bounds)
    if not bounds or workload.num_ranks == 1:
        return None
    ranks = default_ranks(workload.num_ranks, workload.num_ranks, workload.schedule)
    place = ranks.index(LOSS_RANK)
    if place:
        bounds[place] = bounds[place + 1]
    else:
        bounds[1] = bounds[0]
    moved = replace(layout, teacher_bounds=tuple(bounds))
    return None if moved == layout or moved.excess else moved


def folded_cuts(workload: Workload, num_microbatches: int, most_ranks: int) -> list[Cuts]:
    """The most even cuts with two stages on some ranks, for each number of stages.

    Empty if they cannot be faster: if one stage per rank is about even, or if the teacher is cut
    independently, since it is then placed where there is time for it.

    Args:
        workload: The step to cut.
        num_microbatches: Micro-batches per call.
        most_ranks: Most ranks for which it is tried.
    """
    num_ranks = workload.num_ranks
    is_free = workload.schedule in _FOLDING and workload.num_stages is None and not workload.frozen
    is_free = is_free and workload.independent_teacher is None
    if not is_free or not _SEARCHED < num_ranks <= most_ranks:
        return []
    busy = CutSpace(workload, num_ranks, num_microbatches).balanced().busy
    if max(busy) < _UNEVEN * sum(busy) / num_ranks:
        return []
    seconds, speeds = atom_seconds(workload, num_microbatches), workload.ranks.speeds[::-1]
    numbers = range(num_ranks + 1, 2 * num_ranks + 1)
    chains = (Chain(seconds, n, speeds=speeds, joined=workload.joined) for n in numbers)
    found = (chain.fold(max(busy) / _UNEVEN) for chain in chains)
    return list(dict.fromkeys(cuts for cuts in found if cuts is not None))


def atom_seconds(workload: Workload, num_microbatches: int) -> list[float]:
    """Seconds per step of each atom of the student, with its paired teacher."""
    units = workload.units(num_microbatches)
    own, other = (calls * num_microbatches for calls in workload.num_calls)
    teacher = list(pairwise(units["teacher"])) if workload.paired else []
    teacher += [(0.0, 0.0)] * (workload.student.num_atoms - len(teacher))
    forward, backward = pairwise(units["forward"]), pairwise(units["backward"])
    return [
        own * (f1 - f0 + b1 - b0) + other * (t1 - t0)
        for (f0, f1), (b0, b1), (t0, t1) in zip(forward, backward, teacher, strict=True)
    ]


def does_not_fit(closest: Layout) -> PartitionError:
    """The error that names the atom that no rank can hold, or else the rank without memory.

    Args:
        closest: The layout that exceeds the limits least.
    """
    workload = closest.workload
    limit = min(workload.state_limit, max(workload.memory_limits))
    teacher = workload.independent_teacher
    atoms = [*workload.student.atoms, *(() if teacher is None else teacher.atoms)]
    sizes = [stop - start for start, stop in pairwise(workload.state_sums)]
    sizes += [stop - start for start, stop in pairwise(workload.teacher_sums)]
    for atom, size in zip(atoms, sizes, strict=False):  # a paired teacher's is counted already
        if size > limit:
            return PartitionError(
                f"atom {atom.name!r} alone needs {megabytes(size)} for its parameters, gradients "
                f"and optimizer state, but a rank may hold {megabytes(limit)}. An atom is never "
                f"divided. {_REMEDY}"
            )
    held, limits, what = closest.memory_bytes, workload.memory_limits, "state and activations"
    if max(closest.state_bytes) > workload.state_limit:
        held, limits = closest.state_bytes, (workload.state_limit,) * workload.num_ranks
        what = "parameters, gradients and optimizer state"
    rank = max(range(workload.num_ranks), key=lambda rank: held[rank] - limits[rank])

    def needed(atom: int) -> float:
        sums = workload.state_sums, workload.activation_sums
        return sum(each[atom + 1] - each[atom] for each in sums)

    here = [part for part in closest.student_parts if part[2] == rank]
    largest = max((n for start, stop, _ in here for n in range(start, stop)), key=needed)
    return PartitionError(
        f"rank {rank} would need {megabytes(held[rank])} for {what}, but may hold "
        f"{megabytes(limits[rank])}; its largest atom is {workload.student.atoms[largest].name!r}: "
        f"{megabytes(needed(largest))}. {_REMEDY}"
    )


def _moved(cuts: Cuts, positions: Sequence[int], gap: int) -> Iterator[Cuts]:
    """``cuts`` with an inner cut, or two that follow each other, moved by a few positions.

    Args:
        cuts: Ascending, the ends included.
        positions: Where cuts may be.
        gap: How far apart cuts must be at least.
    """
    places = {position: place for place, position in enumerate(positions)}
    inner = range(1, len(cuts) - 1)
    moves = [{index: stride} for index in inner for stride in _STRIDES]
    moves += [{index: a, index + 1: b} for index in inner[:-1] for a in (1, -1) for b in (1, -1)]
    for move in moves:
        moved = list(cuts)
        for index, stride in move.items():
            place = places[cuts[index]] + stride
            moved[index] = positions[place] if 0 <= place < len(positions) else -1
        if all(stop - start >= gap for start, stop in pairwise(moved)):
            yield tuple(moved)
