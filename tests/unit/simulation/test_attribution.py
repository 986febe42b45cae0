from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.registry import build_step
from lightning_tspipe.simulation.attribution import Attribution, Cause, attribute
from lightning_tspipe.simulation.cost import CostTable, StageCost
from lightning_tspipe.simulation.simulator import simulate
from lightning_tspipe.simulation.timeline import Pause, Span, Timeline
from tests.unit.pipelines import uniform_costs

Row = tuple[str, float, float]


def spans(rank: int, *rows: Row, step: int = 0) -> list[Span]:
    return [Span(rank, action, action[1], step, start, end) for action, start, end in rows]


def pauses(rank: int, *rows: Row) -> list[Pause]:
    return [Pause(rank, *row) for row in rows]


def causes(found: Attribution, rank: int) -> dict[str, Any]:
    return {
        cause.name.lower(): pytest.approx(seconds)
        for cause in Cause
        if (seconds := found.seconds(rank, cause)) > 0
    }


def stretches(found: Attribution, rank: int) -> list[tuple[float, float, str]]:
    return [(idle.start, idle.end, str(idle)) for idle in found.idle if idle.rank == rank]


# One step of two ranks; rank 1 reads the data.
#
#   rank 0 |E─      ············  F───L─ L─B─ ······ O .|
#   rank 1 |  ·load D───s F───s ··················  B─── clip O─|
ONE_STEP = [
    *spans(0, ("0E", 0.0, 0.5), ("1F0", 4.5, 5.5), ("0L", 5.5, 6.0), ("0L", 6.5, 7.0),
           ("1B0", 7.0, 7.5), ("0O", 9.0, 9.25)),
    *spans(1, ("1D", 1.0, 2.0), ("0F0", 2.5, 3.5), ("0B0", 8.0, 9.0), ("1O", 9.5, 10.0)),
]  # fmt: skip
PAUSES = [
    *pauses(0, ("receive", 1.0, 4.5), ("clip", 8.0, 9.0)),
    *pauses(1, ("load", 0.25, 0.75), ("send", 2.0, 2.25), ("send", 3.5, 3.75),
            ("receive", 4.0, 8.0), ("clip", 9.25, 9.5)),
]  # fmt: skip


@pytest.fixture
def two_ranks(make_pipeline: Any) -> Pipeline:
    pipeline: Pipeline = make_pipeline(2, 1, 1, teacher=False)
    return pipeline


def test_a_run_that_recorded_its_pauses(two_ranks: Pipeline) -> None:
    found = attribute(Timeline(tuple(ONE_STEP), 2, two_ranks, tuple(PAUSES)))
    assert causes(found, 0) == {
        "waiting": 2.5 + 0.75, "transfer": 1.0, "trainer": 0.5 + 0.5 + 0.5, "optimizer": 1.0
    }  # fmt: skip
    assert causes(found, 1) == {
        "waiting": 3.5, "transfer": 0.25 + 0.25 + 0.5, "loader": 0.5,
        "trainer": 0.5 + 0.25 + 0.25 + 0.25, "optimizer": 0.25,
    }  # fmt: skip
    assert stretches(found, 1)[-6:-2] == [
        (3.5, 3.75, "transfer"), (3.75, 4.0, "Lightning"),
        (4.0, 7.5, "waiting for 1B0 of rank 0"), (7.5, 8.0, "transfer"),
    ]  # fmt: skip
    # When all else is done, rank 0 waits for the last action of the recording.
    assert stretches(found, 0)[-1] == (9.25, 10.0, "waiting for 1O of rank 1")


def test_a_run_of_which_only_actions_are_known(two_ranks: Pipeline) -> None:
    found = attribute(Timeline(tuple(ONE_STEP), 2), two_ranks)
    assert causes(found, 0) == {
        "waiting": 3.0 + 0.75, "transfer": 1.0 + 0.5, "optimizer": 1.5
    }  # fmt: skip
    assert causes(found, 1) == {
        "loader": 1.0, "trainer": 0.5, "waiting": 4.0, "transfer": 0.5, "optimizer": 0.5
    }  # fmt: skip


@pytest.mark.parametrize("is_recorded", [True, False])
def test_effects_wait_for_the_data_rank(two_ranks: Pipeline, is_recorded: bool) -> None:
    actions = [
        *spans(0, ("0O", 0.0, 0.5)),
        *spans(0, ("0E", 2.25, 2.5), step=1),
        *spans(1, ("1O", 0.0, 0.5)),
        *spans(1, ("1D", 1.0, 2.0), ("0F0", 2.0, 2.5), step=1),
    ]
    recorded = pauses(0, ("receive", 0.75, 2.25)) if is_recorded else []
    found = attribute(Timeline(tuple(actions), 2, two_ranks, tuple(recorded)))
    if is_recorded:
        assert stretches(found, 0) == [
            (0.5, 0.75, "Lightning"), (0.75, 2.0, "waiting for 1D of rank 1"),
            (2.0, 2.25, "transfer"),
        ]  # fmt: skip
    else:
        assert stretches(found, 0) == [
            (0.5, 2.0, "waiting for 1D of rank 1"), (2.0, 2.25, "Lightning")
        ]  # fmt: skip


def test_one_simulated_step_by_hand(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 2, teacher=False)
    found = attribute(simulate([gpipe(pipeline)], uniform_costs(pipeline, loss=0.5)))
    assert stretches(found, 0) == [
        (0.0, 1.0, "waiting for 0F0 of rank 1"), (7.5, 9.5, "waiting for 1O of rank 1")
    ]  # fmt: skip
    assert stretches(found, 1) == [(2.0, 5.5, "waiting for 1B1 of rank 0")]
    late = attribute(simulate([gpipe(pipeline)], uniform_costs(pipeline, latency=10)))
    assert stretches(late, 0)[:2] == [
        (0.0, 1.0, "waiting for 0F0 of rank 1"), (1.0, 11.0, "transfer")
    ]  # fmt: skip
    assert stretches(late, 1) == [
        (2.0, 15.0, "waiting for 1B1 of rank 0"), (15.0, 25.0, "transfer")
    ]  # fmt: skip


def test_a_loss_waits_for_a_teacher_that_ran_in_the_step_before(make_pipeline: Any) -> None:
    pipeline = make_pipeline(3, 1, 1, teacher_ranks=(1,))
    actions = [
        *spans(0, ("0O", 0.0, 1.0)),
        *spans(0, ("0L", 10.0, 11.0), step=1),
        *spans(1, ("0T0+1", 1.0, 9.0)),
        *spans(1, ("0T0+1", 9.0, 17.0), step=1),
        *spans(2, ("2D", 5.0, 6.0), step=1),
    ]
    found = attribute(Timeline(tuple(actions), 3, pipeline))
    assert stretches(found, 0)[:2] == [
        (1.0, 9.0, "waiting for 0T0+1 of rank 1"), (9.0, 10.0, "transfer")
    ]  # fmt: skip


def test_the_next_batch_is_read_along_with_this_one(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 1, teacher_ranks=(0,))
    actions = [*spans(1, ("1D", 0.0, 1.0)), *spans(0, ("0T0+1", 1.5, 2.0))]
    found = attribute(Timeline(tuple(actions), 2, pipeline))
    assert stretches(found, 0) == [(0.0, 1.0, "waiting for 1D of rank 1"), (1.0, 1.5, "transfer")]


def steps_of(pipeline: Pipeline, name: str, num_steps: int) -> list[Any]:
    """The first step and those that follow it."""
    ahead = name == "tspipe" and pipeline.teacher is not None
    costs = CostTable.uniform(pipeline)
    programs = [
        build_step(name, pipeline, costs, fresh=now, ahead=int(ahead)) for now in (True, not ahead)
    ]
    return [programs[0], *[programs[1]] * (num_steps - 1)]


SECONDS = st.integers(0, 8).map(lambda n: n / 4)


@st.composite
def stages(draw: st.DrawFn, number: int) -> tuple[StageCost, ...]:
    return tuple(
        StageCost(draw(SECONDS), draw(SECONDS), 0, 0, draw(st.integers(0, 40)), 8)
        for _ in range(number)
    )


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_simulation_waits_and_transfers_and_nothing_else(make_pipeline: Any, data: Any) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    teacher = data.draw(st.booleans())
    pipeline = make_pipeline(
        num_ranks, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), teacher=teacher
    )
    latency = data.draw(SECONDS)
    costs = replace(
        uniform_costs(pipeline, loss=0.5, optimizer=data.draw(SECONDS), latency=latency),
        student=data.draw(stages(num_ranks)),
        teacher=data.draw(stages(num_ranks * teacher)),
        data=data.draw(SECONDS),
        bandwidth=data.draw(st.sampled_from([10.0, float("inf")])),
    )
    name = data.draw(st.sampled_from(["tspipe", "gpipe", "sequential"]))
    timeline = simulate(steps_of(pipeline, name, data.draw(st.integers(1, 6))), costs)
    found = attribute(timeline)
    assert {idle.cause for idle in found.idle} <= {Cause.WAITING, Cause.TRANSFER}
    if latency == 0 and costs.bandwidth == float("inf"):
        assert not any(idle.cause is Cause.TRANSFER for idle in found.idle)
    assert_complete(timeline, found)


def assert_complete(timeline: Timeline, found: Attribution) -> None:
    """Every idle moment of the windows has one cause, and no other moment has any."""
    for rank, (start, end) in enumerate(timeline.windows):
        idle = (end - start - timeline.busy(rank)) / timeline.num_steady_steps
        assert found.seconds(rank) == pytest.approx(idle, abs=1e-9)
        own = [each for each in found.idle if each.rank == rank]
        assert all(a.end <= b.start for a, b in pairwise(own))
        assert all(start <= each.start < each.end <= end for each in own)
        assert not any(overlap(own, timeline.of_rank(rank)))


def overlap(idle: Sequence[Any], work: Sequence[Span]) -> list[bool]:
    return [a.start < b.end and b.start < a.end for a in idle for b in work if b.end > b.start]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_causes_of_a_run_add_up_to_its_idle_time(make_pipeline: Any, data: Any) -> None:
    # A simulated timeline with everything later than it could be, and pauses anywhere.
    pipeline = make_pipeline(2, 1, 2)
    costs = uniform_costs(pipeline, loss=1.0, optimizer=1.0)
    steps = steps_of(pipeline, "tspipe", data.draw(st.integers(1, 5)))
    simulated = simulate(steps, costs)
    late = [
        replace(span, start=3 * span.start + delay / 4, end=3 * span.end + delay / 4)
        for span in simulated.spans
        for delay in [data.draw(st.integers(0, 1))]
    ]
    times = st.integers(0, round(12 * simulated.end)).map(lambda n: n / 4)
    reasons = st.sampled_from(["receive", "send", "load", "clip", "something new"])
    drawn = st.tuples(st.integers(0, 1), reasons, times, times)
    recorded = [
        Pause(rank, reason, min(times), max(times))
        for rank, reason, *times in data.draw(st.lists(drawn, max_size=12))
    ]
    shortened = [replace(span, end=max(span.start, span.end - 0.25)) for span in late]
    timeline = Timeline(tuple(shortened), 2, pipeline, tuple(recorded))
    assert_complete(timeline, attribute(timeline))


PRINTED = """\
idle, ms per step      waiting     transfer      loader    Lightning    optimizer     together
rank 0             3250.0  32%  1000.0  10%           -  1500.0  15%  1000.0  10%  6750.0  68%
rank 1             3500.0  35%  1000.0  10%  500.0   5%  1250.0  12%   250.0   2%  6500.0  65%
rank 0 waits longest for 0F0 of rank 1 (2500.0 ms), 1O of rank 1 (750.0 ms)
rank 1 waits longest for 1B0 of rank 0 (3500.0 ms)"""


def test_prints_one_line_for_each_rank_and_what_it_waited_for(two_ranks: Pipeline) -> None:
    found = attribute(Timeline(tuple(ONE_STEP), 2, two_ranks, tuple(PAUSES)))
    assert str(found) == PRINTED


def test_without_knowing_who_waits_for_whom(make_pipeline: Any, two_ranks: Pipeline) -> None:
    timeline = Timeline(tuple(ONE_STEP), 2)
    with pytest.raises(ConfigurationError, match=r"give its plan too \(--plan plan\.json\)"):
        attribute(timeline)
    with pytest.raises(ConfigurationError, match="a pipeline of 3 ranks for a timeline of 2"):
        attribute(timeline, make_pipeline(3, 1, 1))
    assert attribute(timeline, two_ranks).num_steps == 1


def test_nothing(two_ranks: Pipeline) -> None:
    found = attribute(Timeline((), 2, two_ranks))
    assert found.idle == ()
    assert (found.share(0), found.awaited(0)) == (0.0, ())
