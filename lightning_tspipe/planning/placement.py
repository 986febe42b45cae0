"""Placement of atoms on ranks: decided by a plan, carried out by an engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lightning_tspipe.schedules.windows import window_ranks

Cuts = tuple[int, ...]
"""First atom of each stage of a network, and the number of atoms; () without a network."""


@dataclass(frozen=True)
class Pieces:
    """The first atoms of a frozen trunk, which a batch goes through in pieces.

    Activations are large between the first layers of a network, and small between the last. Pieces
    of a batch need less memory, and large activations then stay in the CPU's caches; but most
    layers take longer for several pieces than for the whole batch::

        pieces   |a0─a1─a2|a0─a1─a2|
        whole                      |a3──a4──a5|

    Attributes:
        num_atoms: Number of these atoms.
        number: Number of pieces of a batch.
    """

    num_atoms: int = 0
    number: int = 1

    def within(self, num_atoms: int, ends: Collection[int]) -> Pieces:
        """The same, limited to the first atoms.

        Args:
            num_atoms: Largest number of atoms.
            ends: Possible numbers of atoms.
        """
        most = min(self.num_atoms, num_atoms)
        last = max((end for end in ends if end <= most), default=0)
        return replace(self, num_atoms=last) if last else WHOLE


WHOLE = Pieces()
"""No atoms: the batch goes through as a whole."""


@dataclass(frozen=True)
class Placement:
    """The cuts of both networks, and the ranks of their stages.

    Attributes:
        num_ranks: Ranks of the pipeline.
        student_cuts: First atom of each student stage, and the number of atoms.
        student_ranks: Rank of each student stage.
        teacher_cuts: The same for the teacher; empty without one.
        teacher_ranks: Rank of each teacher stage.
        num_microbatches: Micro-batches per call.
        split: Student stages whose backward runs in two halves.
        recomputed: Atoms of the student that are recomputed in the backward, so that only their
            inputs are saved.
        student_holders: For each student stage all ranks that hold its values, including its own;
            () if each stage is on one rank.
        teacher_holders: The same for the teacher.
        depth: For heads, how many batches their trunk runs ahead.
        pieces: For heads, the atoms of their trunk that a batch goes through in pieces.
        data_rank: The rank that reads the data; -1: the last one.
    """

    num_ranks: int
    student_cuts: Cuts
    student_ranks: tuple[int, ...]
    teacher_cuts: Cuts = ()
    teacher_ranks: tuple[int, ...] = ()
    num_microbatches: int = 1
    split: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()
    depth: int = 1
    student_holders: tuple[tuple[int, ...], ...] = ()
    teacher_holders: tuple[tuple[int, ...], ...] = ()
    pieces: Pieces = WHOLE
    data_rank: int = -1

    def __post_init__(self) -> None:
        if self.data_rank < 0:
            object.__setattr__(self, "data_rank", self.num_ranks - 1)

    @classmethod
    def of(
        cls,
        num_ranks: int,
        student: Cuts,
        teacher: Cuts = (),
        num_microbatches: int = 1,
        schedule: str = "",
    ) -> Placement:
        """Stages on ranks as in :func:`default_ranks`; what is not called has no cuts.

        Args:
            num_ranks: Ranks of the pipeline.
            student: The student's cuts.
            teacher: The teacher's.
            num_microbatches: Micro-batches per call.
            schedule: The schedule, which may go over the ranks in its own way.
        """
        ranks_of = partial(default_ranks, num_ranks=num_ranks, schedule=schedule)
        student_ranks, teacher_ranks = ranks_of(len(student) - 1), ranks_of(len(teacher) - 1)
        return cls(
            num_ranks, student, student_ranks or (0,), teacher, teacher_ranks, num_microbatches,
            data_rank=ranks_of(1)[0],
        )  # fmt: skip

    @property
    def cuts(self) -> dict[Literal["student", "teacher"], Cuts]:
        """The cuts of each network."""
        return {"student": self.student_cuts, "teacher": self.teacher_cuts}

    @property
    def ranks(self) -> dict[Literal["student", "teacher"], tuple[int, ...]]:
        """The ranks of each network's stages."""
        return {"student": self.student_ranks, "teacher": self.teacher_ranks}

    @property
    def holders(self) -> dict[Literal["student", "teacher"], tuple[tuple[int, ...], ...]]:
        """All ranks that hold each stage of each network; the first one is its owner."""
        alone = {name: tuple((rank,) for rank in own) for name, own in self.ranks.items()}
        return {
            "student": self.student_holders or alone["student"],
            "teacher": self.teacher_holders or alone["teacher"],
        }


def default_ranks(num_stages: int, num_ranks: int, schedule: str = "") -> tuple[int, ...]:
    """The first stage on the last rank, the others before it; folded if there are more than ranks.

    The rank that reads the data has the first stage, so that no other rank has to wait for the end
    of its step before starting the next. That is so for all schedules but ``zbv``, see
    :func:`~lightning_tspipe.schedules.windows.window_ranks`.

    >>> default_ranks(3, 3), default_ranks(3, 2)
    ((2, 1, 0), (1, 0, 1))
    """
    return window_ranks(schedule, num_stages, num_ranks)
