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

from dataclasses import replace
from itertools import chain

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.phases import assemble, backwards, forwards, losses, teachers


def one_f_one_b(pipeline: Pipeline, *, fresh: bool, ahead: int) -> Schedule:
    """One step: on every rank one batch forwards, one backwards.

    Args:
        pipeline: The pipeline, with one stage of the student on each rank.
        fresh: Whether the pipeline is empty, so that it is filled first.
        ahead: Number of batches that follow this one, or more than the pipeline holds.

    Raises:
        ScheduleError: The stages don't run from the last rank down to rank 0.
    """
    _check_stages(pipeline)
    # Rank w runs forwards w batches ahead; those before that only to fill the pipeline.
    batches = range(min(pipeline.num_ranks, ahead + 1))
    body = [
        action
        for batch in batches
        for action in (*teachers(pipeline, batch=batch), *forwards(pipeline, batch=batch))
        if pipeline.rank_of(action) == batch or (fresh and pipeline.rank_of(action) > batch)
    ]
    read = [batch for batch in batches if fresh or batch == pipeline.data_rank]
    whole = chain(body, losses(pipeline), backwards(pipeline))
    return replace(assemble(pipeline, whole, batches=read), asynchronous=True)


def _check_stages(pipeline: Pipeline) -> None:
    """Refuse a pipeline in which a batch does not go from rank to rank."""
    if pipeline.student.ranks != tuple(reversed(range(pipeline.num_ranks))):
        raise ScheduleError(
            f"schedule 1f1b has one stage of the student on each of {pipeline.num_ranks} ranks, "
            f"the first on the last rank; here stages are on ranks {pipeline.student.ranks}"
        )
    if pipeline.student.num_microbatches != 1:
        raise ScheduleError("schedule 1f1b does not split a batch: use num_microbatches=1")
    teacher = pipeline.teacher.ranks if pipeline.teacher is not None else ()
    if list(teacher) != sorted(teacher, reverse=True):
        raise ScheduleError(f"schedule 1f1b: the ranks of a teacher must not rise: {teacher}")
