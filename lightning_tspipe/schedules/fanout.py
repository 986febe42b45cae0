"""Fan-out: one frozen trunk, many heads (McNeela, Patel and Gupta, *Pipelined Transfer Learning*).

Every rank holds a part of the trunk and trains heads of its own. Heads don't depend on each other,
and the trunk depends only on its input: so stage s of the trunk works on a later batch than stage
s + 1, and no rank waits for a result of the same step. A step is one forward of the trunk and one
step of the rank's heads (forward, loss, backward, update)::

    stage s:  T(n + d(s)) | F(n) of its heads | L(n) | B(n)        d(s) = max(1, depth - s)

Three stages (rank 2 holds stage 0), one head on each rank, depth 3, forwards of one unit, backwards
of two; the queues fill in the first step (``t``: trunk of a later batch)::

    rank 0 |  T0F0B0──t0F0B0──t0F0B0──t0|
    rank 1 |T0t0  F0B0──t0F0B0──t0F0B0──|  and so on
    rank 2 |T0t0t0t0  F0B0──t0F0B0──t0F0|

The depth limits the queues: a batch is read at most ``depth`` steps early. If it is at least the
number of stages, no stage waits for another; otherwise the last stages form a chain within the
step, after the heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule


def distance(stage: int, depth: int) -> int:
    """Number of batches that a stage of the trunk is ahead of its heads."""
    return max(1, depth - stage) if depth else 0


def fanout(pipeline: Pipeline, *, before: int, following: int, depth: int) -> Schedule:
    """One step of every rank.

    Args:
        pipeline: The pipeline, whose student stages are the heads.
        before: Number of batches that the step before could run ahead; 0 if nothing ran ahead (the
            first step, and the first after a drain).
        following: Number of batches after this one that are available, at most ``depth``.
        depth: How many batches the trunk's first stage runs ahead; 0: none.
    """
    return Schedule(
        pipeline,
        tuple(
            tuple(_rank(pipeline, rank, before, following, depth))
            for rank in range(pipeline.num_ranks)
        ),
    )


def _rank(
    pipeline: Pipeline, rank: int, before: int, following: int, depth: int
) -> Iterator[Action]:
    trunk = list(_trunk(pipeline, rank, before, following, depth))
    early = [action for action, is_early in trunk if is_early]
    yield Action(Op.EFFECTS, rank)
    if rank == pipeline.data_rank:
        yield Action(Op.DATA, rank)
        for batch in _batches(0, before, following, depth):
            if batch:
                yield Action(Op.DATA, rank, batch=batch)
    yield from early
    heads = pipeline.stages_of(rank)
    units = range(pipeline.student.num_units)
    yield from (Action(Op.FORWARD, head, unit) for head in heads for unit in units)
    if heads:
        yield Action(Op.LOSS, rank)
    yield from (Action(Op.BACKWARD, head, unit) for head in heads for unit in units)
    yield from (action for action, is_early in trunk if not is_early)
    yield Action(Op.OPTIMIZER, rank)


def _trunk(
    pipeline: Pipeline, rank: int, before: int, following: int, depth: int
) -> Iterator[tuple[Action, bool]]:
    """The rank's forwards of the trunk, and whether each comes before its heads.

    Those that depend on another rank's work in this step come after the heads, to avoid waiting.
    """
    layout = pipeline.layout(Op.TEACHER)
    for stage in (s for s in range(layout.num_stages) if layout.ranks[s] == rank):
        made = _batches(stage - 1, before, following, depth) if stage else range(0)
        for batch in _batches(stage, before, following, depth):
            is_early = batch == 0 or batch not in made or layout.ranks[stage - 1] == rank
            for unit in range(layout.num_units):
                yield Action(Op.TEACHER, stage, unit, batch), is_early


def _batches(stage: int, before: int, following: int, depth: int) -> range:
    """The batches that a stage works on in this step: those available and not done before."""
    own = distance(stage, depth)
    return range(min(own, before), min(own, following) + 1)
