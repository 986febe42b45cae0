"""Inter-layer model parallelism: one device works at a time, as in TSPipe's baseline (table 3).

Actions start as soon as their inputs are available, so the order alone must keep every other device
waiting: each stage begins with the unit that the stage before it finished *last*. So the order of
the units alternates, and each stage's backwards are, as everywhere, the reverse of its forwards.
Three stages (rank 2 holds stage 0) and two units::

    rank 0 |                T0T1F0F1B1──B0──                |
    rank 1 |        F1F0T1T0                B0──B1──        |
    rank 2 |T0T1F0F1                                B1──B0──|

A teacher with a different number of stages than the student overlaps with it a little.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Coupling, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.phases import assemble, losses


def sequential(pipeline: Pipeline) -> Schedule:
    """Stage after stage: teacher and student forwards; the loss; backwards, stage after stage."""
    forwards = list(_forwards(pipeline))
    students = [action for action in forwards if action.op is Op.FORWARD]
    if pipeline.is_fed:  # it begins when the teacher has ended
        teachers = [action for action in forwards if action.op is Op.TEACHER]
        forwards = [*teachers, Action(Op.PROLOGUE, pipeline.data_rank), *students]
    backwards = [Action(Op.BACKWARD, action.stage, action.unit) for action in reversed(students)]
    return assemble(pipeline, [*forwards, *losses(pipeline), *backwards])


def _forwards(pipeline: Pipeline) -> Iterator[Action]:
    networks = [(Op.FORWARD, pipeline.student)]
    if pipeline.teacher is not None:
        networks.insert(0, (Op.TEACHER, pipeline.teacher))
    # A frozen prefix comes before the student; any other teacher runs beside it.
    starts = [0, networks[0][1].num_stages if pipeline.coupling is Coupling.PREFIX else 0]
    placed = list(zip(networks, starts, strict=False))
    for place in range(max(start + layout.num_stages for (_, layout), start in placed)):
        cells = [
            Action(op, place - start, unit)
            for (op, layout), start in placed
            if 0 <= place - start < layout.num_stages
            for unit in range(layout.num_units)
        ]
        yield from cells if place % 2 == 0 else reversed(cells)
