"""Gradients that are summed over the replicas of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.synthesis import synthesize
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate, steady_step_time
from tests.unit.pipelines import uniform_costs


def optimizer_start(schedule: Schedule, costs: CostTable) -> float:
    (start,) = (x.start for x in simulate([schedule], costs).spans if x.action == "0O")
    return start


@pytest.mark.parametrize(
    ("reduction", "start"),
    [
        (0.0, 5.0),
        # The last eighth follows the last backward, from 3 to 5.
        (0.8, 5 + 0.1),
        # The link is busy from the first eighth on.
        (8.0, 3 + 0.25 + 8),
    ],
)
def test_the_optimizer_waits_for_the_sum(
    make_pipeline: Any, reduction: float, start: float
) -> None:
    # One forward, two backwards of 2 seconds: only what follows the last one is left to be hidden.
    pipeline = make_pipeline(1, 1, 1, teacher=False)
    costs = replace(uniform_costs(pipeline, forward=3), reduction=(reduction,))
    assert optimizer_start(gpipe(pipeline), costs) == pytest.approx(start)
    # The next step waits for it.
    assert steady_step_time(gpipe(pipeline), costs) == pytest.approx(start)


def test_the_teacher_hides_the_sum(make_pipeline: Any) -> None:
    pipeline = make_pipeline(1, 1, 2)
    costs = replace(uniform_costs(pipeline, teacher=4), reduction=(10.0,))
    schedule = synthesize(pipeline, costs, teacher_now=False, teacher_next=True)
    # The student ends at 6, its last backward begins at 4; the teacher's 8 seconds follow.
    assert steady_step_time(schedule, costs) == pytest.approx(4 + 0.25 + 10)
    short = replace(costs, reduction=(9.0,))
    assert steady_step_time(schedule, short) == pytest.approx(6 + 8)
    # GPipe's order has the teacher in front.
    assert steady_step_time(gpipe(pipeline), costs) == pytest.approx(8 + 4 + 0.25 + 10)


def test_ranks_wait_for_their_own_sums(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 1, teacher=False)
    costs = replace(CostTable.uniform(pipeline), reduction=(0.0, 4.0))
    spans = {x.action: x for x in simulate([gpipe(pipeline)], costs).spans}
    assert spans["0O"].start == spans["1B0"].end == 4
    assert spans["1O"].start == spans["0B0"].start + 0.25 + 4
