"""Constraints of the user on a plan, and the values that are left to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Literal

from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.workload import Workload
from lightning_tspipe.schedules.registry import ASYNCHRONOUS

_LEAST_TRIED = 8
"""Numbers of micro-batches up to at least this one are tried; deep pipelines need more."""

_MOST_PER_RANK = 6
"""Most micro-batches per rank between two epochs: as many as PipeTransformer tries."""

_MAX_ACTIONS = 12_000
"""Most actions of a step: its schedule must be found in seconds, and run in Python."""

_MAX_SUBSETS = 3
"""Most stages of which all subsets are tried as those whose backward is split."""


@dataclass(frozen=True)
class Constraints:
    """Decisions of the user that a plan must follow; the defaults leave them to the planner.

    Attributes:
        schedule: Name of the schedule.
        ahead: Whether the teacher may run ahead, if the schedule does that.
        num_microbatches: Micro-batches per call.
        partition: Number of atoms in each stage of the student.
        split: Whether backwards run in halves; "auto" decides by cost, for "tspipe" only.
        num_stages: Stages of the student; None: one for each rank, or, behind a frozen part, fewer
            if it has not as many atoms.
    """

    schedule: str = "tspipe"
    ahead: bool = True
    num_microbatches: int | Literal["auto"] = "auto"
    partition: Sequence[int] | Literal["auto"] = "auto"
    split: bool | Literal["auto"] = "auto"
    num_stages: int | None = None

    def cuts(self, workload: Workload) -> tuple[int, ...] | None:
        """First atom of each student stage, and the number of atoms; None to choose.

        Raises:
            ConfigurationError: A rank without a stage, or a stage without an atom.
            PartitionError: The numbers don't add up to the student's atoms; names them.
        """
        if self.partition == "auto":
            return None
        counts, num_atoms = list(self.partition), workload.student.num_atoms
        if any(count < 1 for count in counts) or len(counts) < workload.num_ranks:
            raise ConfigurationError(
                f"partition={counts}: give at least one atom to each stage, and at least "
                f"{workload.num_ranks} stages, one for each device"
            )
        if sum(counts) != num_atoms:
            names = ", ".join(atom.name for atom in workload.student.atoms)
            raise PartitionError(
                f"partition={counts} cuts {sum(counts)} atoms, and the student has {num_atoms}: "
                f"{names}"
            )
        return tuple(accumulate(counts, initial=0))

    def microbatch_counts(self, workload: Workload) -> tuple[int, ...]:
        """Numbers of micro-batches to try, whose units were measured.

        Deep pipelines and fast teachers, which must fill the bubble, need more.
        """
        if self.num_microbatches != "auto":
            return (self.num_microbatches,)
        if self.schedule in {"sequential", ASYNCHRONOUS}:
            return (1,)
        smallest, _ = workload.measured_sizes
        samples = min(workload.batch_sizes)
        actions = workload.num_ranks * (3 * workload.num_calls[0] + workload.num_calls[1])
        most = max(1, min(samples // smallest, _MAX_ACTIONS // actions))
        if workload.frozen:  # all ranks wait for this plan
            most = min(most, max(_LEAST_TRIED, _MOST_PER_RANK * workload.num_ranks))
        wanted = min(most, max(_LEAST_TRIED, _filling(workload)))
        powers = (2**power for power in range(most.bit_length()))
        return tuple(n for n in powers if n < 2 * wanted)

    def splits(self, workload: Workload, num_stages: int) -> tuple[frozenset[int], ...]:
        """Sets of stages whose backward is split; never stage 0, for which nobody waits."""
        later = frozenset(range(1, num_stages))
        if workload.student.recomputed:
            return (frozenset(),)  # each half would run the stage again
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


def _filling(workload: Workload) -> int:
    """The number of micro-batches with which the teacher fills the bubble of the first stage.

    ``V u t_T >= (P - 1) (t_S + t_B)``, in seconds of all stages and with whole backwards, which
    need the most (TSPipe, section 3.2); in whole units, and with a teacher forward instead of
    ``t_S`` if that is longer, since a slow teacher reaches the next stage later. Without a teacher,
    four times as many units as ranks leave a bubble of a fifth.
    """
    sums = workload.units(1)
    teacher = sums.teacher[-1] if sums.teacher else 0.0
    if not teacher or not workload.num_calls[1]:
        return 4 * workload.num_ranks // workload.num_calls[0]
    units = (max(sums.forward[-1], teacher) + sums.backward[-1]) / teacher
    needed = (workload.num_ranks - 1) * math.ceil(min(units, _MAX_ACTIONS))
    return math.ceil(needed / workload.num_calls[1])
