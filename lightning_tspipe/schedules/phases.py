"""Building blocks of fixed orders: phases, and the frame around them.

A fixed order is one list for the whole pipeline in which every action comes after its dependencies;
each rank takes its own part of it. So several stages on one rank are merged without a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule


def assemble(pipeline: Pipeline, body: Iterable[Action], *, teacher_next: bool) -> Schedule:
    """Give each rank its part of ``body``, between effects and data, and the optimizer."""
    ranks = [opening(pipeline, rank, teacher_next=teacher_next) for rank in _ranks(pipeline)]
    for action in body:
        ranks[pipeline.rank_of(action)].append(action)
    for rank, actions in enumerate(ranks):
        actions.append(Action(Op.OPTIMIZER, rank))
    return Schedule(pipeline, tuple(map(tuple, ranks)))


def opening(pipeline: Pipeline, rank: int, *, teacher_next: bool) -> list[Action]:
    """The first actions of a rank's step: the effects, and on the data rank the data."""
    actions = [Action(Op.EFFECTS, rank)]
    if rank == pipeline.data_rank:
        actions.append(Action(Op.DATA, rank))
        if teacher_next and pipeline.teacher is not None:
            actions.append(Action(Op.DATA, rank, batch=1))
    return actions


def forwards(pipeline: Pipeline) -> Iterator[Action]:
    """All student forwards, stage after stage."""
    return _grid(Op.FORWARD, pipeline.student, 0)


def teachers(pipeline: Pipeline, *, batch: int) -> Iterator[Action]:
    """All teacher forwards of a batch, stage after stage; none without a teacher."""
    return iter(()) if pipeline.teacher is None else _grid(Op.TEACHER, pipeline.teacher, batch)


def backwards(pipeline: Pipeline) -> Iterator[Action]:
    """All backwards, in exactly the reverse order of the forwards."""
    for action in reversed(list(forwards(pipeline))):
        yield Action(Op.BACKWARD, action.stage, action.unit)


def teacher_only(pipeline: Pipeline) -> Schedule:
    """The teacher of the next batch and nothing else, as run by the step before."""
    ranks: list[list[Action]] = [[] for _ in _ranks(pipeline)]
    ranks[pipeline.data_rank].append(Action(Op.DATA, pipeline.data_rank, batch=1))
    for action in teachers(pipeline, batch=1):
        ranks[pipeline.rank_of(action)].append(action)
    return Schedule(pipeline, tuple(map(tuple, ranks)))


def loss(pipeline: Pipeline) -> Action:
    """The loss of the whole batch."""
    return Action(Op.LOSS, pipeline.loss_rank)


def _grid(op: Op, layout: NetworkLayout, batch: int) -> Iterator[Action]:
    for stage in range(layout.num_stages):
        for unit in range(layout.num_units):
            yield Action(op, stage, unit, batch)


def _ranks(pipeline: Pipeline) -> range:
    return range(pipeline.num_ranks)
