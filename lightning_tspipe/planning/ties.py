"""Tied parameters: several atoms, or one and the loss, read them, and a rank holds them once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

Parts = tuple[tuple[int, int, int], ...]
"""First atom, end and rank of each stage of a network."""


@dataclass(frozen=True)
class Tied:
    """A parameter or buffer that several atoms read, or one and the loss.

    Attributes:
        name: Its name.
        num_bytes: Its bytes; each of its readers counts them.
        trainable_bytes: Its bytes if it gets a gradient, else 0.
        student: Atoms of the student that read it.
        teacher: Atoms of the teacher that do.
        with_loss: Whether it lies with the loss, too.
    """

    name: str
    num_bytes: int
    trainable_bytes: int = 0
    student: tuple[int, ...] = ()
    teacher: tuple[int, ...] = ()
    with_loss: bool = False

    def freezing(self, num_atoms: int) -> Tied:
        """The same after the student's first atoms have become a teacher."""
        student = tuple(atom - num_atoms for atom in self.student if atom >= num_atoms)
        return replace(self, student=student, teacher=self.student[: -len(student) or None])


def held_twice(
    ties: Iterable[Tied], rank: int, student: Parts, teacher: Parts, *, has_loss: bool
) -> tuple[int, int]:
    """What a rank holds once and its atoms and the loss count several times.

    Args:
        ties: The tied parameters.
        rank: The rank.
        student: Stages of the student.
        teacher: Stages of the teacher.
        has_loss: Whether the loss is on the rank.

    Returns:
        Bytes of parameters, and of gradients, that are counted too many.
    """
    parameters = gradients = 0
    for tied in ties:
        own = _num_on(rank, tied.student, student) + int(tied.with_loss and has_loss)
        others = _num_on(rank, tied.teacher, teacher)
        parameters += tied.num_bytes * max(0, own + others - 1)
        gradients += tied.trainable_bytes * max(0, own - 1)
    return parameters, gradients


def _num_on(rank: int, atoms: Iterable[int], parts: Parts) -> int:
    """The number of some atoms that lie on a rank."""
    return sum(start <= n < stop for n in atoms for start, stop, on in parts if on == rank)
