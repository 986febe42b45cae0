"""Relaying: drawn, proved, and as fast as its slowest stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.relay.simulated import distributions
from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.plain import from_plain, plain
from lightning_tspipe.schedules.relay import relay, relay_pipeline
from lightning_tspipe.simulation.cost import CostTable, StageCost
from lightning_tspipe.simulation.simulator import (
    StepGraph,
    graph_seconds,
    simulate,
    steady_step_time,
)


def test_is_drawn() -> None:
    assert str(relay(relay_pipeline([(2,), (1,), (0,)]))) == (
        "0E 2T0 2F0 0L 2B0 0O\n1E 1T0 1F0 1L 1B0 1O\n2E 2D 0T0 0F0 2L 0B0 2O"
    )
    shared = relay(relay_pipeline([(2, 1), (0,)]))
    assert str(shared) == ("0E 1T0 1F0 0L 1B0 0O\n1E 0T1 0F1 1L 0B1 1O\n2E 2D 0T0 0F0 2L 0B0 2O")
    sent = {str(m) for m in shared.messages}
    assert {"0T0>1T0@0", "0T1>1T0@0", "2D>0T1@1", "0B0>1O@1", "0B1>2O@2"} <= sent


def test_timeline_is_drawn() -> None:
    pipeline = relay_pipeline([(2,), (1,), (0,)])
    timeline = simulate([relay(pipeline)] * 2, CostTable.uniform(pipeline))
    assert timeline.draw(width=20).splitlines() == [
        "rank 0 |    T0F0B0──T0F0B0──|",
        "rank 1 |  T0F0B0──T0F0B0──  |",
        "rank 2 |T0F0B0──T0F0B0──    |",
    ]


@pytest.mark.parametrize("is_relayed", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_distribution_is_valid(num_ranks: int, is_relayed: bool) -> None:
    for plan in distributions(3, num_ranks):
        program = relay(relay_pipeline(plan.ranks, is_relayed=is_relayed))
        validate(program)
        sources = {(m.source, m.target) for m in program.messages if m.payload == "activation"}
        neighbours = {(a, b) for one, other in pairwise(plan.ranks) for a in one for b in other}
        assert sources <= neighbours
        assert bool(sources) == (is_relayed and plan.num_stages > 1)


def test_a_step_takes_as_long_as_its_slowest_stage() -> None:
    pipeline = relay_pipeline([(4, 3), (2,), (1, 0)])
    student = tuple(StageCost(f, 2 * f) for f in (1.0, 2.5, 0.5))
    teacher = tuple(StageCost(f) for f in (0.5, 1.0, 0.3))
    costs = CostTable(student, teacher, 0.0, (0.1,) * 5, (0.0,) * 5)
    schedule = relay(pipeline)
    assert steady_step_time(schedule, costs) == pytest.approx(1.0 + 7.5 + 0.1)
    # With a barrier, each step starts with all ranks idle.
    assert graph_seconds(StepGraph.of(schedule), costs) == pytest.approx(0.5 + 8.5 + 0.1)


def test_gradients_are_summed_before_the_update() -> None:
    pipeline = relay_pipeline([(1, 0)])
    costs = replace(CostTable.uniform(pipeline), latency=0.5)
    # The input has to get to rank 0 too.
    assert steady_step_time(relay(pipeline), costs) == pytest.approx(0.5 + 4.0 + 0.5)


def test_shares_belong_to_their_ranks() -> None:
    schedule = relay(relay_pipeline([(2, 1), (0,)]))
    swapped = Schedule(schedule.pipeline, (*schedule.ranks[:1], *reversed(schedule.ranks[1:])))
    with pytest.raises(ScheduleError, match="belongs to rank"):
        validate(swapped)


def test_pipelines_are_stored() -> None:
    pipeline = relay_pipeline([(3, 2), (1,), (0,)], is_relayed=False)
    assert from_plain(Pipeline, plain(pipeline)) == pipeline
