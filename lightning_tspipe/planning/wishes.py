"""What the user left to the planner, and what not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Literal

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.workload import Workload

_NUM_MICROBATCHES = (1, 2, 4, 8)
_MAX_SUBSETS = 3
"""With so many stages at most, every choice of stages whose backward is split is tried."""


@dataclass(frozen=True)
class Wishes:
    """What the user decided already.

    Attributes:
        schedule: Name of the schedule.
        ahead: Whether the teacher may run ahead, if the schedule does that.
        num_microbatches: Micro-batches per call.
        cuts: First atom of each student stage, and the number of atoms; None to choose.
        split: Whether backwards run in halves.
    """

    schedule: str
    ahead: bool
    num_microbatches: int | Literal["auto"]
    cuts: tuple[int, ...] | None
    split: bool | Literal["auto"]

    def microbatch_counts(self, workload: Workload) -> tuple[int, ...]:
        """Numbers of micro-batches to try: their units must have been measured."""
        if self.num_microbatches != "auto":
            return (self.num_microbatches,)
        if self.schedule == "sequential":
            return (1,)
        networks = [n for n in (workload.student, workload.teacher) if n is not None]
        smallest = max((network.sizes[0] for network in networks if network.sizes), default=1)
        samples = min(workload.batch_sizes)
        return tuple(n for n in _NUM_MICROBATCHES if n == 1 or samples // n >= smallest)

    def splits(self, workload: Workload, num_stages: int) -> tuple[frozenset[int], ...]:
        """Sets of stages to split. Nobody waits for stage 0, so it stays whole."""
        later = frozenset(range(1, num_stages))
        if self.split != "auto":
            return (later if self.split else frozenset(),)
        if self.schedule != "tspipe" or not workload.student.can_split:
            return (frozenset(),)
        if len(later) <= _MAX_SUBSETS:
            return tuple(
                frozenset(chosen)
                for size in range(num_stages)
                for chosen in combinations(sorted(later), size)
            )
        odd = frozenset(range(1, num_stages, 2))
        return frozenset(), frozenset({num_stages - 1}), odd, later


def explicit_cuts(counts: Sequence[int], workload: Workload) -> tuple[int, ...]:
    """Cuts from the user's numbers of atoms per stage.

    Raises:
        ConfigurationError: Not at least one stage for each rank, and one atom for each stage.
        PartitionError: Not the number of atoms that there are; names them.
    """
    num_atoms = workload.student.num_atoms
    if any(count < 1 for count in counts) or len(counts) < workload.num_ranks:
        raise ConfigurationError(
            f"partition={list(counts)}: give at least one atom to each stage, and at least "
            f"{workload.num_ranks} stages, one for each device"
        )
    if sum(counts) != num_atoms:
        names = ", ".join(atom.name for atom in workload.student.atoms)
        raise PartitionError(
            f"partition={list(counts)} cuts {sum(counts)} atoms, and the student has {num_atoms}: "
            f"{names}"
        )
    return tuple(accumulate(counts, initial=0))
