"""Fan-out: one frozen trunk, many heads (McNeela, Patel and Gupta, *Pipelined Transfer Learning*).

Every rank holds a part of the trunk and trains heads of its own. Heads don't depend on each other,
and the trunk depends on nothing but its input: so stage s of the trunk works on a later batch than
stage s + 1, and nobody waits for what is made in the same step. A step is one forward of the trunk
and one step of the rank's heads (forward, loss, backward, update)::

    stage s:  T(n + d(s)) | F(n) of its heads | L(n) | B(n)        d(s) = max(1, depth - s)

Three stages (rank 2 holds stage 0), one head on each rank, depth 3, forwards of one unit, backwards
of two; the queues fill in the first step (``t``: trunk of a later batch)::

    rank 0 |  T0F0B0──t0F0B0──t0F0B0──t0|
    rank 1 |T0t0  F0B0──t0F0B0──t0F0B0──|  and so on
    rank 2 |T0t0t0t0  F0B0──t0F0B0──t0F0|

The depth bounds the queues: a batch is read at most ``depth`` steps before its own. From as many
steps as there are stages on, no stage waits for another; with less, the last stages form a chain
within the step, behind the heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule


def distance(stage: int, depth: int) -> int:
    """How many batches ahead of its heads a stage of the trunk works."""
    return max(1, depth - stage) if depth else 0


def fanout(pipeline: Pipeline, *, before: int, following: int, depth: int) -> Schedule:
    """One step of every rank.

    Args:
        pipeline: Who holds what; its student's stages are the heads.
        before: How many batches were at hand beyond its own in the step before; 0 where nothing
            ran ahead (the first step, and the first after a drain).
        following: How many batches are at hand beyond this one, at most ``depth``.
        depth: How far the trunk's first stage runs ahead; 0: not at all.
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
    """The rank's forwards of the trunk, and whether they come before its heads.

    Those that read what another rank makes in the same step come behind them, instead of waiting.
    """
    layout = pipeline.layout(Op.TEACHER)
    for stage in (s for s in range(layout.num_stages) if layout.ranks[s] == rank):
        made = _batches(stage - 1, before, following, depth) if stage else range(0)
        for batch in _batches(stage, before, following, depth):
            is_early = batch == 0 or batch not in made or layout.ranks[stage - 1] == rank
            for unit in range(layout.num_units):
                yield Action(Op.TEACHER, stage, unit, batch), is_early


def _batches(stage: int, before: int, following: int, depth: int) -> range:
    """The batches on which a stage works in this step: what is at hand and not done before."""
    own = distance(stage, depth)
    return range(min(own, before), min(own, following) + 1)
