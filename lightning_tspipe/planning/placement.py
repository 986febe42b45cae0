"""Placement of atoms on ranks: decided by a plan, carried out by an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_tspipe.planning.pieces import WHOLE, Pieces


@dataclass(frozen=True)
class Placement:
    """The cuts of both networks, and the ranks of their stages.

    Attributes:
        num_ranks: Ranks of the pipeline.
        student_cuts: First atom of each student stage, and the number of atoms.
        student_ranks: The rank of each student stage.
        teacher_cuts: The same for the teacher; empty without one.
        teacher_ranks: The rank of each teacher stage.
        num_microbatches: Micro-batches per call.
        split: Student stages whose backward runs in two halves.
        recomputed: Atoms of the student that run again in the backward, so that only what they
            got is kept.
        student_holders: For each student stage all ranks that hold its values, its own rank among
            them; () where each stage is on one rank.
        teacher_holders: The same for the teacher.
        depth: Of heads: how far their trunk runs ahead.
        pieces: Of heads: what of their trunk a batch goes through in pieces, within one stage.
    """

    num_ranks: int
    student_cuts: tuple[int, ...]
    student_ranks: tuple[int, ...]
    teacher_cuts: tuple[int, ...] = ()
    teacher_ranks: tuple[int, ...] = ()
    num_microbatches: int = 1
    split: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()
    depth: int = 1
    student_holders: tuple[tuple[int, ...], ...] = ()
    teacher_holders: tuple[tuple[int, ...], ...] = ()
    pieces: Pieces = WHOLE

    @property
    def holders(self) -> dict[Literal["student", "teacher"], tuple[tuple[int, ...], ...]]:
        """All ranks that hold each stage of each network."""
        return {"student": self.student_holders, "teacher": self.teacher_holders}

    @property
    def data_rank(self) -> int:
        """The rank that reads the data: the last, whatever stages it holds."""
        return self.num_ranks - 1


def default_ranks(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """The first stage on the last rank, the others before it; folded if there are more than ranks.

    The rank that reads the data has the first stage, so that no other one has to wait for the end
    of its step before it may start the next.

    >>> default_ranks(3, 3), default_ranks(3, 2)
    ((2, 1, 0), (1, 0, 1))
    """
    return tuple((num_ranks - 1 - stage) % num_ranks for stage in range(num_stages))
