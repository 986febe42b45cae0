"""Building blocks of fixed orders: phases, and the frame around them.

A fixed order is one list for the whole pipeline in which every action comes after its dependencies;
each rank takes its own part of it. So several stages on one rank are merged without a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule


def assemble(
    pipeline: Pipeline, body: Iterable[Action], *, batches: Iterable[int] = (0,)
) -> Schedule:
    """Give each rank its part of ``body``, between effects and data, and the optimizer.

    Args:
        pipeline: The pipeline.
        body: The actions of all ranks.
        batches: The batches that are read, as offsets from the batch of this step.
    """
    ranks = range(pipeline.num_ranks)
    effects = (Action(Op.EFFECTS, rank) for rank in ranks)
    updates = (Action(Op.OPTIMIZER, rank) for rank in ranks)
    return _divided(pipeline, chain(effects, _data(pipeline, batches), body, updates))


def fill_and_drain(pipeline: Pipeline) -> Schedule:
    """All teacher forwards of the batch, all student forwards, the losses, all backwards."""
    forward = chain(teachers(pipeline, batch=0), forwards(pipeline))
    return assemble(pipeline, chain(forward, losses(pipeline), backwards(pipeline)))


def teacher_only(pipeline: Pipeline) -> Schedule:
    """The teacher of the next batch and nothing else, as run by the step before."""
    return _divided(pipeline, chain(_data(pipeline, (1,)), teachers(pipeline, batch=1)))


def forwards(pipeline: Pipeline, *, batch: int = 0) -> Iterator[Action]:
    """All student forwards, stage after stage, behind what makes their inputs of the teacher's."""
    if pipeline.is_fed:
        yield Action(Op.PROLOGUE, pipeline.data_rank, batch=batch)
    yield from _grid(Op.FORWARD, pipeline.student, batch)


def teachers(pipeline: Pipeline, *, batch: int) -> Iterator[Action]:
    """All teacher forwards of a batch, stage after stage; none without a teacher."""
    return iter(()) if pipeline.teacher is None else _grid(Op.TEACHER, pipeline.teacher, batch)


def backwards(pipeline: Pipeline) -> Iterator[Action]:
    """All backwards, in exactly the reverse order of the forwards."""
    return reversed(list(_grid(Op.BACKWARD, pipeline.student, 0)))


def losses(pipeline: Pipeline) -> Iterator[Action]:
    """The loss of the whole batch, on each rank that has one."""
    return (Action(Op.LOSS, rank) for rank in pipeline.loss_ranks)


def _grid(op: Op, layout: NetworkLayout, batch: int) -> Iterator[Action]:
    for stage in range(layout.num_stages):
        for unit in layout.units_of(stage):
            yield Action(op, stage, unit, batch)


def _data(pipeline: Pipeline, batches: Iterable[int]) -> Iterator[Action]:
    return (Action(Op.DATA, pipeline.data_rank, batch=batch) for batch in batches)


def _divided(pipeline: Pipeline, actions: Iterable[Action]) -> Schedule:
    ranks: list[list[Action]] = [[] for _ in range(pipeline.num_ranks)]
    for action in actions:
        ranks[pipeline.rank_of(action)].append(action)
    return Schedule(pipeline, tuple(map(tuple, ranks)))
