"""The order of two pipelines, one after the other: the teacher's, then the student's.

    rank 1  |T0T1T2T3  F0F1  B0F2B1F3B2  B3
    rank 0  |  T0T1T2T3  F0L0B0F1L1B1F2L2B2F3L3B3

As where a library runs the teacher's schedule for all batches of an accumulation window, keeps what
it gave, and then runs the student's. All else is as in the package: executor, transport, loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_tspipe import DelayedTeacherUpdate
from lightning_tspipe.ir.action import Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.schedules import windows
from lightning_tspipe.schedules.windows import Cell


def two_phases() -> DelayedTeacherUpdate:
    """From now on, windows of this process run the teacher first.

    Returns:
        A callback by which no forward of it runs ahead of an update.
    """
    vars(windows)["_with_teacher"] = _teacher_first
    return DelayedTeacherUpdate(delay=0)


def _teacher_first(
    pipeline: Pipeline, rank: int, cells: Iterator[Cell], following: Iterable[int]
) -> Iterator[Cell]:
    own, teacher = list(cells), pipeline.teacher
    held = [] if teacher is None else [s for s, owner in enumerate(teacher.ranks) if owner == rank]
    number = 1 + max(batch for *_, batch in own)
    yield from ((Op.TEACHER, stage, batch) for batch in range(number) for stage in held)
    yield from own
    yield from ((Op.TEACHER, stage, batch) for batch in following for stage in held)
