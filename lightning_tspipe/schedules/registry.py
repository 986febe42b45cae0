"""Schedules by name, as the strategy's argument gives them."""

from __future__ import annotations

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.sequential import sequential
from lightning_tspipe.schedules.synthesis import synthesize
from lightning_tspipe.schedules.zero_bubble import split_backward
from lightning_tspipe.simulation.cost import CostTable

SCHEDULES = ("tspipe", "gpipe", "sequential")


def runs_ahead(name: str) -> bool:
    """Whether the schedule ``name`` runs the teacher of the next batch early.

    Raises:
        ScheduleError: There is no such schedule.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return name == "tspipe"


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
        name: ``"tspipe"`` (the best order that runs ahead), ``"gpipe"`` or ``"sequential"``.
        pipeline: Who holds what. Without a teacher the two flags mean nothing.
        costs: For ``"tspipe"``, which chooses its order by them.
        teacher_now: The teacher of this batch runs in this step: the first after a drain, or no
            running ahead at all.
        teacher_next: The teacher of the next batch runs ahead in this step.
        split: Student stages whose backward runs in two halves.

    Raises:
        ScheduleError: An unknown name, or running ahead with a schedule that does not.
    """
    if runs_ahead(name):
        return synthesize(
            pipeline, costs, teacher_now=teacher_now, teacher_next=teacher_next, split=split
        )
    if pipeline.teacher is not None and (teacher_next or not teacher_now):
        raise ScheduleError(
            f"{name} runs the teacher in the step of its batch; "
            "build it with teacher_now=True, teacher_next=False"
        )
    schedule = gpipe(pipeline) if name == "gpipe" else sequential(pipeline)
    return split_backward(schedule, split)
