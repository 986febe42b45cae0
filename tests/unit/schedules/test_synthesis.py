from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.planning.bounds import cycle_seconds
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.list_scheduling import Policy, list_schedule
from lightning_tspipe.schedules.registry import build_step
from lightning_tspipe.schedules.synthesis import synthesize
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.schedules.zero_bubble import split_backward
from lightning_tspipe.simulation.cost import CostTable, StageCost
from lightning_tspipe.simulation.simulator import StepGraph, steady_step_time
from tests.unit.pipelines import uniform_costs
from tests.unit.versions import versions

SECONDS = st.integers(0, 8).map(lambda n: n / 4)


def steady(pipeline: Pipeline, costs: CostTable, *split: int) -> Schedule:
    return synthesize(pipeline, costs, teacher_now=False, teacher_next=True, split=frozenset(split))


def test_two_ranks_without_a_bubble(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 2, 1)
    costs = CostTable.uniform(pipeline)
    schedule = steady(pipeline, costs, 1)
    assert str(schedule) == (
        "0E 1F0 1F1 0L 1I1 1I0 1W1 1W0 1T0+1 1T1+1 0O\n1E 1D 1D+1 0F0 0F1 0T0+1 0T1+1 0B1 0B0 1O"
    )
    assert steady_step_time(schedule, costs) == 8


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_utilisation(make_pipeline: Any, num_ranks: int, num_calls: int) -> None:
    # With halves, 2 (P - 1) units fill the bubble; with whole backwards it takes 3 (P - 1).
    later = range(1, num_ranks)
    for num_units, split in ((2 * (num_ranks - 1), later), (4 * (num_ranks - 1), ())):
        pipeline = make_pipeline(num_ranks, num_calls, num_units // num_calls)
        costs = CostTable.uniform(pipeline)
        schedule = steady(pipeline, costs, *split)
        validate(schedule)
        assert 4 * num_units / steady_step_time(schedule, costs) >= 0.98


def test_the_order_follows_the_costs(make_pipeline: Any) -> None:
    # Slow backwards leave a longer bubble, which more teacher units fill.
    pipeline = make_pipeline(2, 1, 8)
    for backward, early in ((1.0, 2), (3.0, 4)):
        schedule = steady(pipeline, uniform_costs(pipeline, backward=backward))
        cells = [str(cell) for cell in schedule.ranks[1]]
        before = cells[: cells.index("0B7")]
        assert sum("T" in cell for cell in before) == early


@pytest.mark.parametrize(
    ("patience", "order"), [(0.4, "T0+1 T1+1 B1 B0"), (0.6, "T0+1 B1 B0 T1+1")]
)
def test_a_filler_waits_for_what_is_urgent(make_pipeline: Any, patience: float, order: str) -> None:
    # Rank 1 forwards until 2 and runs a teacher unit until 8; a gradient arrives at 11.
    pipeline = make_pipeline(2, 1, 2)
    costs = uniform_costs(pipeline, teacher=6, latency=3)
    graph = StepGraph.of(tspipe(pipeline, teacher_now=False, teacher_next=True))
    ranks = list_schedule(graph, costs, Policy(patience), repeats=False)
    assert " ".join(str(cell)[1:] for cell in ranks[1][5:-1]) == order


@st.composite
def pipelines(draw: st.DrawFn, max_ranks: int = 4, max_microbatches: int = 3) -> Pipeline:
    num_ranks = draw(st.integers(1, max_ranks))
    num_stages = draw(st.integers(num_ranks, num_ranks + 2))
    ranks = tuple((num_stages - 1 - stage) % num_ranks for stage in range(num_stages))
    num_calls, num_microbatches = draw(st.integers(1, 2)), draw(st.integers(1, max_microbatches))
    taps = draw(st.frozensets(st.integers(0, num_stages - 1), max_size=2))
    student = NetworkLayout(ranks, num_calls, num_microbatches, taps | {num_stages - 1})
    teacher = None
    if draw(st.booleans()):
        held = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
        placed = draw(st.sampled_from([ranks, tuple(sorted(held, reverse=True))]))
        calls = draw(st.integers(1, 2))
        teacher = NetworkLayout(placed, calls, num_microbatches, frozenset({len(placed) - 1}))
    return Pipeline(num_ranks, student, teacher, data_rank=ranks[0])


@st.composite
def costs_of(draw: st.DrawFn, pipeline: Pipeline) -> CostTable:
    def stages(num_stages: int) -> tuple[StageCost, ...]:
        drawn = st.builds(
            StageCost, SECONDS, SECONDS, SECONDS, SECONDS, st.integers(0, 9), st.integers(0, 9)
        )
        return tuple(draw(drawn) for _ in range(num_stages))

    teacher = pipeline.teacher
    return replace(
        uniform_costs(pipeline, loss=draw(SECONDS), optimizer=draw(SECONDS)),
        student=stages(pipeline.student.num_stages),
        teacher=() if teacher is None else stages(teacher.num_stages),
        latency=draw(SECONDS),
        bandwidth=draw(st.sampled_from([1.0, 10.0, float("inf")])),
        nodes=draw(st.sampled_from([(), tuple(rank // 2 for rank in range(pipeline.num_ranks))])),
        inter_node_latency=draw(SECONDS),
        inter_node_bandwidth=draw(st.sampled_from([1.0, 5.0])),
        reduction=draw(
            st.sampled_from([(), tuple(rank / 2 for rank in range(pipeline.num_ranks))])
        ),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_schedule_is_valid_and_none_is_slower_than_the_fixed_ones(
    data: st.DataObject,
) -> None:
    check_schedules(data, data.draw(pipelines()))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_nor_is_one_of_many_ranks_and_units(data: st.DataObject) -> None:
    check_schedules(data, data.draw(pipelines(max_ranks=9, max_microbatches=10)))


def check_schedules(data: st.DataObject, pipeline: Pipeline) -> None:
    """Build each kind of step with drawn costs; compare with the fixed orders and the bound."""
    costs = data.draw(costs_of(pipeline))
    split = data.draw(st.frozensets(st.integers(0, pipeline.student.num_stages - 1)))
    built = {}
    for now, ahead in ((True, True), (False, True), (False, False), (True, False)):
        built[now, ahead] = schedule = build_step(
            "tspipe", pipeline, costs, fresh=now, ahead=int(ahead), split=split
        )
        validate(schedule)
    versions([built[True, True], built[False, True], built[False, False]])
    for now in (True, False):
        fixed = split_backward(tspipe(pipeline, teacher_now=now, teacher_next=not now), split)
        assert steady_step_time(built[now, not now], costs) <= (
            steady_step_time(fixed, costs) + 1e-9
        )
    found = steady_step_time(built[False, True], costs)
    plain = split_backward(gpipe(pipeline), split)
    assert found <= steady_step_time(plain, costs) + 1e-9
    # No order is faster than what every stage waits for.
    assert found >= max(cycle_seconds(pipeline, costs, split)) - 1e-9
    gpipe_bound = max(cycle_seconds(pipeline, costs, split, teacher_first=True))
    assert steady_step_time(plain, costs) >= gpipe_bound - 1e-9


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_fixed_schedule_is_valid(data: st.DataObject) -> None:
    pipeline = data.draw(pipelines())
    split = data.draw(st.frozensets(st.integers(0, pipeline.student.num_stages - 1)))
    costs = CostTable.uniform(pipeline)
    for name in ("gpipe", "sequential"):
        schedule = build_step(name, pipeline, costs, fresh=True, ahead=0, split=split)
        validate(schedule)
        assert Schedule.parse(str(schedule), pipeline) == schedule


def test_refuses_costs_of_another_pipeline(make_pipeline: Any) -> None:
    with pytest.raises(ScheduleError, match="costs for 3 student stages"):
        steady(make_pipeline(2, 1, 1), CostTable.uniform(make_pipeline(3, 1, 1)))
