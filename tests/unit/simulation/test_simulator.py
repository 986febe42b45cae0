from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate, steady_step_time
from lightning_tspipe.simulation.timeline import Timeline
from tests.unit.pipelines import uniform_costs


def times(timeline: Timeline, step: int = 0) -> dict[str, tuple[float, float]]:
    return {span.action: (span.start, span.end) for span in timeline.spans if span.step == step}


def test_one_step_by_hand(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 2, teacher=False)
    found = times(simulate([gpipe(pipeline)], uniform_costs(pipeline, loss=0.5)))
    assert found == {
        "1E": (0, 0), "1D": (0, 0), "0F0": (0, 1), "0F1": (1, 2),
        "0E": (0, 0), "1F0": (1, 2), "1F1": (2, 3), "0L": (3, 3.5),
        "1B1": (3.5, 5.5), "1B0": (5.5, 7.5), "0O": (7.5, 7.5),
        "0B1": (5.5, 7.5), "0B0": (7.5, 9.5), "1O": (9.5, 9.5),
    }  # fmt: skip


def test_latency_does_not_block_the_sender(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 2, teacher=False)
    costs = uniform_costs(pipeline, latency=10)
    found = times(simulate([gpipe(pipeline)], costs))
    assert [found[text] for text in ("0F1", "1F0", "1F1")] == [(1, 2), (11, 12), (12, 13)]


def test_messages_queue_for_the_bandwidth_of_their_link(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 2, teacher=False)
    costs = CostTable.uniform(pipeline)
    first = replace(costs.student[0], output_bytes=50)
    slow = replace(costs, student=(first, costs.student[1]), bandwidth=10.0)
    found = times(simulate([gpipe(pipeline)], slow))
    assert found["1F0"][0] == 1 + 5
    assert found["1F1"][0] == 1 + 5 + 5
    # Gradients go the other way, over a link of their own.
    assert found["0B1"][0] == found["1B1"][1] + 5


def test_the_loss_waits_for_the_teacher_of_the_step_before(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 1)
    steps = [
        tspipe(pipeline, teacher_now=now, teacher_next=ahead)
        for now, ahead in ((True, True), (False, False))
    ]
    slow = uniform_costs(pipeline, teacher=100)
    timeline = simulate(steps, slow)
    assert times(timeline, 1)["0L"][0] >= times(timeline)["1T0+1"][1] >= 200


def test_steps_follow_each_other_without_a_barrier(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 2, 2)
    schedule = tspipe(pipeline, teacher_now=False, teacher_next=True)
    timeline = simulate([schedule] * 5, uniform_costs(pipeline, backward=1))
    # Rank 1 starts its next step while rank 0 still works on this one.
    assert times(timeline, 3)["0F0"][0] < times(timeline, 2)["0O"][0]


def test_step_time_is_that_of_the_timeline(make_pipeline: Any) -> None:
    pipeline = make_pipeline(3, 2, 2)
    costs = uniform_costs(pipeline, optimizer=0.25, latency=0.1)
    schedule = tspipe(pipeline, teacher_now=False, teacher_next=True)
    timeline = simulate([schedule] * 9, costs)
    assert steady_step_time(schedule, costs) == pytest.approx(timeline.step_time)
    assert timeline.bubble_ratio == pytest.approx(1 - (16 + 0.25) / timeline.step_time)


def test_sequential_steps_take_the_sum_of_everything(make_pipeline: Any) -> None:
    pipeline = make_pipeline(1, 2, 3)
    costs = uniform_costs(pipeline, loss=5, optimizer=7)
    assert steady_step_time(gpipe(pipeline), costs) == 6 * 4 + 5 + 7


def test_names_what_is_blocked(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 1, teacher=False)
    schedule = Schedule.parse("0E 0L 1F0 1B0 0O\n1E 1D 0F0 0B0 1O", pipeline)
    with pytest.raises(
        ScheduleError, match=r"rank 0 at 0L \(step 0\) waits for 1F0; rank 1 at 0B0"
    ):
        simulate([schedule], CostTable.uniform(pipeline))


def test_refuses_costs_of_another_pipeline(make_pipeline: Any) -> None:
    schedule = gpipe(make_pipeline(2, 1, 1))
    with pytest.raises(ScheduleError, match="costs for 3 student stages"):
        simulate([schedule], CostTable.uniform(make_pipeline(3, 1, 1)))


def test_no_steps(make_pipeline: Any) -> None:
    assert simulate([], CostTable.uniform(make_pipeline(1, 1, 1))).spans == ()
