"""Asynchronous 1F1B: a forward, a backward, an update (Narayanan et al., PipeDream, SOSP 2019).

A mini-batch is one unit, and the pipeline is never drained: after the update of batch n each rank
continues immediately. A rank that is w ranks before the loss runs forwards w batches ahead, with
weights that lack w updates; the *weight policy* decides how to handle that. Three stages (rank 2
holds stage 0), an epoch of six batches, a backward that costs two forwards::

    rank 0 |    F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──        |
    rank 1 |  F0F1    B0──F2B1──F3B2──F4B3──F5B4──  B5──    |
    rank 2 |F0F1F2        B0──F3B1──F4B2──F5B3──  B4──  B5──|

A step of rank w is `F0+w`, then `B0`. The first step after a drain also runs the w forwards before
that; at the end of an epoch, forwards of batches that don't exist are omitted.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule


def one_f_one_b(pipeline: Pipeline, *, fresh: bool, ahead: int) -> Schedule:
    """One step: on every rank one batch forwards, one backwards.

    Args:
        pipeline: The pipeline, with one stage of the student on each rank.
        fresh: Whether the pipeline is empty, so that it is filled first.
        ahead: Number of batches that follow this one, or more than the pipeline holds.

    Raises:
        ScheduleError: The stages don't run from the last rank down to rank 0.
    """
    check_stages(pipeline)
    ranks = []
    for rank in range(pipeline.num_ranks):
        batches = [batch for batch in range(0 if fresh else rank, rank + 1) if batch <= ahead]
        actions = [Action(Op.EFFECTS, rank)]
        if rank == pipeline.data_rank:
            actions += [Action(Op.DATA, rank, batch=batch) for batch in batches]
        for batch in batches:
            actions += _forwards(Op.TEACHER, pipeline.teacher, rank, batch)
            actions += _forwards(Op.FORWARD, pipeline.student, rank, batch)
        if rank == pipeline.loss_rank:
            actions.append(Action(Op.LOSS, rank))
        backwards = reversed(list(_forwards(Op.BACKWARD, pipeline.student, rank, 0)))
        ranks.append((*actions, *backwards, Action(Op.OPTIMIZER, rank)))
    return Schedule(pipeline, tuple(ranks), asynchronous=True)


def check_stages(pipeline: Pipeline) -> None:
    """Refuse a pipeline in which a batch does not go from rank to rank.

    Raises:
        ScheduleError: Says how stages must be placed.
    """
    if pipeline.student.ranks != tuple(reversed(range(pipeline.num_ranks))):
        raise ScheduleError(
            f"schedule 1f1b has one stage of the student on each of {pipeline.num_ranks} ranks, "
            f"the first on the last rank; here stages are on ranks {pipeline.student.ranks}"
        )
    if pipeline.student.num_microbatches != 1:
        raise ScheduleError("schedule 1f1b does not split a batch: use num_microbatches=1")
    teacher = pipeline.teacher.ranks if pipeline.teacher is not None else ()
    if list(teacher) != sorted(teacher, reverse=True):
        raise ScheduleError(f"schedule 1f1b: the teacher goes back, through ranks {teacher}")


def _forwards(op: Op, layout: NetworkLayout | None, rank: int, batch: int) -> Iterator[Action]:
    if layout is None:
        return
    for stage, owner in enumerate(layout.ranks):
        if owner == rank:
            for unit in range(layout.num_units):
                yield Action(op, stage, unit, batch)
