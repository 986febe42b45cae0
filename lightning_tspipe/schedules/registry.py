"""Schedules by name, as in the strategy's argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.pipeline import Coupling, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.fanout import fanout
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.one_f_one_b import one_f_one_b
from lightning_tspipe.schedules.sequential import sequential
from lightning_tspipe.schedules.synthesis import synthesize
from lightning_tspipe.schedules.window_steps import WindowSteps
from lightning_tspipe.schedules.windows import ACROSS_STEPS, WINDOWS
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
    known = (*SCHEDULES, *WINDOWS)
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
    is_fanout = pipeline.coupling is Coupling.FANOUT
    if name in ACROSS_STEPS:
        return (WindowSteps(name, pipeline).lookahead,) * pipeline.num_ranks
    if not is_fanout and (name != ASYNCHRONOUS or pipeline.num_ranks == 1):
        ahead = runs_ahead(name) and pipeline.teacher is not None
        return (int(ahead),) * pipeline.num_ranks
    most = max(depth, pipeline.num_ranks)
    schedule = build_step(name, pipeline, fresh=False, ahead=most, depth=depth)
    furthest = []
    for rank, actions in enumerate(schedule.ranks):
        received = (message.producer for message in schedule.receives[rank])
        furthest.append(max(action.batch for action in (*actions, *received)))
    return tuple(furthest)


def build_step(  # noqa: PLR0913 -- what one step is, in full
    name: str,
    pipeline: Pipeline,
    costs: CostTable | None = None,
    *,
    fresh: bool,
    ahead: int,
    split: frozenset[int] = frozenset(),
    depth: int = 1,
) -> Schedule:
    """Build one step of an epoch.

    Args:
        name: ``"tspipe"`` (the best order that runs ahead), one of :data:`FIXED`, or ``"1f1b"``.
        pipeline: The pipeline.
        costs: Costs by which ``"tspipe"`` chooses its order; None: all stages cost the same.
        fresh: Whether nothing of this batch was done in a step before.
        ahead: Number of following batches that may be worked on.
        split: Student stages whose backward runs in two halves.
        depth: For heads, how many batches their trunk runs ahead.

    Raises:
        ScheduleError: There is no such schedule, or its stages must be placed otherwise.
    """
    if pipeline.coupling is Coupling.FANOUT:
        depth = depth if runs_ahead(name) and pipeline.num_ranks > 1 else 0
        before = 0 if fresh else min(depth, ahead + 1)
        return fanout(pipeline, before=before, following=min(depth, ahead), depth=depth)
    if name == ASYNCHRONOUS:
        whole = one_f_one_b(pipeline, fresh=fresh, ahead=ahead)
        return replace(split_backward(whole, split), halves=split)
    if not runs_ahead(name):
        return split_backward(FIXED[name](pipeline), split)
    has_teacher = pipeline.teacher is not None
    return synthesize(
        pipeline, costs or CostTable.uniform(pipeline),
        teacher_now=has_teacher and fresh, teacher_next=has_teacher and ahead > 0, split=split,
    )  # fmt: skip


def steady_step(name: str, pipeline: Pipeline, costs: CostTable, split: frozenset[int]) -> Schedule:
    """Build a step that repeats."""
    early = name == ASYNCHRONOUS or runs_ahead(name)
    number = pipeline.num_ranks if early else 0
    return build_step(name, pipeline, costs, fresh=not early, ahead=number, split=split)
