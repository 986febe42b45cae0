"""TSPipe's order (Lim et al., ICML 2022, section 3.2 and figure 4b).

The teacher of batch n + 1 has no backward pass that fixes it in time, so a part of its forwards
fills the bubble of stage s between its student's forwards and the first gradient::

    stage s:  F(n), all units | k(s) units of T(n + 1) | B(n), reverse order | the rest of T(n + 1)

A stage waits for the forwards and the backwards of the S - 1 - s stages after it: two units for
each, when a teacher forward takes as long as a student forward and as the half-size backward unit
of the paper. Hence k(s) = 2 (S - 1 - s), at most all V u units. For the paper's V = 2 and
u = S - 1 that is its V (u - s); with one view it also fills the bubble, which the paper's formula
does not. Three stages (rank 2 holds stage 0), two views in two micro-batches, and backwards as
long as forwards (``t0``: teacher forward of the next batch)::

    rank 0 |    F0F1F2F3B3B2B1B0t0t1t2t3|
    rank 1 |  F0F1F2F3t0t1B3B2B1B0t2t3  |
    rank 2 |F0F1F2F3t0t1t2t3B3B2B1B0    |
"""

from __future__ import annotations

from itertools import chain

from lightning_tspipe.ir.action import Action
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.phases import assemble, backwards, forwards, losses, teachers


def tspipe(pipeline: Pipeline, *, teacher_now: bool, teacher_next: bool) -> Schedule:
    """The paper's order for any number of stages, views and micro-batches.

    Args:
        pipeline: The pipeline. Ranks with several stages run each phase stage by stage.
        teacher_now: Whether the teacher of this batch runs in this step, since nothing ran ahead.
        teacher_next: Whether the teacher of the next batch runs ahead in this step.
    """
    now = teachers(pipeline, batch=0) if teacher_now else ()
    has_next = teacher_next and pipeline.teacher is not None
    ahead = list(teachers(pipeline, batch=1)) if has_next else []
    early = [action for action in ahead if _fills_the_bubble(action, pipeline)]
    late = [action for action in ahead if not _fills_the_bubble(action, pipeline)]
    body = chain(now, forwards(pipeline), early, losses(pipeline), backwards(pipeline), late)
    return assemble(pipeline, body, batches=(0, 1) if has_next else (0,))


def _fills_the_bubble(action: Action, pipeline: Pipeline) -> bool:
    layout = pipeline.layout(action.op)
    return action.unit is not None and action.unit < 2 * (layout.num_stages - 1 - action.stage)
