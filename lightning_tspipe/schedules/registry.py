"""Schedules by name, as in the strategy's argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.lowering import lower
from lightning_tspipe.ir.pipeline import Coupling, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.fanout import fanout
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.one_f_one_b import one_f_one_b
from lightning_tspipe.schedules.sequential import sequential
from lightning_tspipe.schedules.synthesis import synthesize
from lightning_tspipe.schedules.zero_bubble import split_backward
from lightning_tspipe.simulation.cost import CostTable

FIXED: Mapping[str, Callable[[Pipeline], Schedule]] = {"gpipe": gpipe, "sequential": sequential}
"""Orders that run the teacher in the step of its batch, and do not depend on costs."""
SCHEDULES = ("tspipe", *FIXED)
"""Synchronous schedules: a batch is trained with the weights after the batch before."""
ASYNCHRONOUS = "1f1b"


def runs_ahead(name: str) -> bool:
    """Whether the schedule ``name`` runs the teacher of the next batch early.

    Raises:
        ScheduleError: There is no such schedule.
    """
    known = (*SCHEDULES, ASYNCHRONOUS)
    if name not in known:
        raise ScheduleError(f"no schedule {name!r}; choose one of {', '.join(known)}")
    return name == "tspipe"


def lookahead(name: str, pipeline: Pipeline, depth: int = 1) -> tuple[int, ...]:
    """For each rank, how many batches ahead its step works on or receives.

    Args:
        name: Name of the schedule.
        pipeline: The pipeline.
        depth: For heads, how many batches their trunk runs ahead.
    """
    if pipeline.coupling is Coupling.FANOUT:
        depth = depth if runs_ahead(name) and pipeline.num_ranks > 1 else 0
        return _reach(fanout(pipeline, before=depth, following=depth, depth=depth))
    if name != ASYNCHRONOUS or pipeline.num_ranks == 1:
        ahead = runs_ahead(name) and pipeline.teacher is not None
        return (int(ahead),) * pipeline.num_ranks
    return _reach(one_f_one_b(pipeline, fresh=False, ahead=pipeline.num_ranks))


def _reach(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the last batch that it works on or receives something of."""
    program = lower(schedule)
    return tuple(
        max(
            *(action.batch for action in actions),
            *(message.producer.batch for message in program.receives.get(rank, ())),
        )
        for rank, actions in enumerate(schedule.ranks)
    )


def build_step(  # noqa: PLR0913 -- what one step is, in full
    name: str,
    pipeline: Pipeline,
    costs: CostTable,
    *,
    fresh: bool,
    ahead: int,
    split: frozenset[int] = frozenset(),
    depth: int = 1,
) -> Schedule:
    """Build one step of an epoch.

    Args:
        name: As for :func:`build_schedule`.
        pipeline: The pipeline.
        costs: Costs by which ``"tspipe"`` chooses its order.
        fresh: Whether nothing of this batch was done in a step before.
        ahead: Number of following batches that may be worked on.
        split: Student stages whose backward runs in two halves.
        depth: For heads, how many batches their trunk runs ahead.
    """
    if pipeline.coupling is Coupling.FANOUT:
        depth = depth if runs_ahead(name) and pipeline.num_ranks > 1 else 0
        before = 0 if fresh else min(depth, ahead + 1)
        return fanout(pipeline, before=before, following=min(depth, ahead), depth=depth)
    if name == ASYNCHRONOUS:
        return one_f_one_b(pipeline, fresh=fresh, ahead=ahead)
    has_teacher = pipeline.teacher is not None
    return build_schedule(
        name, pipeline, costs,
        teacher_now=has_teacher and fresh, teacher_next=has_teacher and ahead > 0, split=split,
    )  # fmt: skip


def build_schedule(  # noqa: PLR0913 -- what one step is, in full
    name: str,
    pipeline: Pipeline,
    costs: CostTable,
    *,
    teacher_now: bool,
    teacher_next: bool,
    split: frozenset[int] = frozenset(),
) -> Schedule:
    """Build one step.

    Args:
        name: ``"tspipe"`` (the best order that runs ahead), one of :data:`FIXED`, or ``"1f1b"``
            (a step of the steady state).
        pipeline: The pipeline. Without a teacher the two flags have no effect.
        costs: Costs by which ``"tspipe"`` chooses its order.
        teacher_now: Whether the teacher of this batch runs in this step: in the first after a
            drain, or without running ahead.
        teacher_next: Whether the teacher of the next batch runs ahead in this step.
        split: Student stages whose backward runs in two halves.

    Raises:
        ScheduleError: An unknown name, or running ahead with a schedule that does not.
    """
    if name == ASYNCHRONOUS:
        return one_f_one_b(pipeline, fresh=False, ahead=pipeline.num_ranks)
    if runs_ahead(name):
        return synthesize(
            pipeline, costs, teacher_now=teacher_now, teacher_next=teacher_next, split=split
        )
    if pipeline.teacher is not None and (teacher_next or not teacher_now):
        raise ScheduleError(
            f"{name} runs the teacher in the step of its batch; "
            "build it with teacher_now=True, teacher_next=False"
        )
    return split_backward(FIXED[name](pipeline), split)
