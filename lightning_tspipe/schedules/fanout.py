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
from dataclasses import replace
from itertools import chain

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.phases import assemble, forwards, losses


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
    trunk = list(_trunk(pipeline, before, following, depth))
    heads = list(forwards(pipeline))
    body = chain(
        (action for action, is_early in trunk if is_early),
        heads,
        losses(pipeline),
        (replace(action, op=Op.BACKWARD) for action in heads),
        (action for action, is_early in trunk if not is_early),
    )
    ahead = (batch for batch in _batches(0, before, following, depth) if batch)
    return assemble(pipeline, body, batches=(0, *ahead))


def _trunk(
    pipeline: Pipeline, before: int, following: int, depth: int
) -> Iterator[tuple[Action, bool]]:
    """The forwards of the trunk, and whether each comes before the heads of its rank.

    Those that depend on another rank's work in this step come after the heads, to avoid waiting.
    """
    layout = pipeline.layout(Op.TEACHER)
    for stage, rank in enumerate(layout.ranks):
        made = _batches(stage - 1, before, following, depth) if stage else range(0)
        for batch in _batches(stage, before, following, depth):
            is_early = batch == 0 or batch not in made or layout.ranks[stage - 1] == rank
            for unit in range(layout.num_units):
                yield Action(Op.TEACHER, stage, unit, batch), is_early


def _batches(stage: int, before: int, following: int, depth: int) -> range:
    """The batches that a stage works on in this step: those available and not done before."""
    own = distance(stage, depth)
    return range(min(own, before), min(own, following) + 1)
