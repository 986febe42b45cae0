from __future__ import annotations

from itertools import product

import pytest

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.schedules.fanout import fanout
from lightning_tspipe.simulation.cost import CostTable, StageCost
from lightning_tspipe.simulation.simulator import simulate
from lightning_tspipe.simulation.timeline import Timeline
from tests.unit.pipelines import fanout_pipeline, uniform_costs


def epoch(pipeline: Pipeline, depth: int, num_batches: int) -> list[Schedule]:
    """All steps between two drains."""
    following = [min(depth, num_batches - 1 - step) for step in range(num_batches)]
    return [
        fanout(pipeline, before=before, following=now, depth=depth)
        for before, now in zip([0, *following], following, strict=False)
    ]


def timeline(pipeline: Pipeline, depth: int, costs: CostTable, num_batches: int = 12) -> Timeline:
    return simulate(list(epoch(pipeline, depth, num_batches)), costs)


def test_is_drawn() -> None:
    first, second, *_ = epoch(fanout_pipeline((0, 1, 2), 3), 3, 6)
    assert str(first) == (
        "0E 2T0 0F0 0L 0B0 2T0+1 0O\n"
        "1E 1T0 1F0 1L 1B0 1T0+1 1T0+2 1O\n"
        "2E 2D 2D+1 2D+2 2D+3 0T0 0T0+1 0T0+2 0T0+3 2F0 2L 2B0 2O"
    )
    assert str(second) == (
        "0E 2T0+1 0F0 0L 0B0 0O\n1E 1T0+2 1F0 1L 1B0 1O\n2E 2D 2D+3 0T0+3 2F0 2L 2B0 2O"
    )


@pytest.mark.parametrize(
    ("num_ranks", "num_heads", "depth", "num_batches"),
    [c for c in product((1, 2, 3, 4), (1, 3, 6), (0, 1, 2, 4, 6), (1, 2, 7)) if sum(c) % 3 == 0],
)
def test_every_stage_sees_every_batch_once(
    num_ranks: int, num_heads: int, depth: int, num_batches: int
) -> None:
    pipeline = fanout_pipeline(tuple(head % num_ranks for head in range(num_heads)), num_ranks)
    steps = epoch(pipeline, depth, num_batches)
    for step in steps:
        validate(step)
    ran = [
        (action.stage, number + action.batch)
        for number, step in enumerate(steps)
        for actions in step.ranks
        for action in actions
        if action.op is Op.TEACHER
    ]
    assert sorted(ran) == [(s, b) for s in range(num_ranks) for b in range(num_batches)]
    offsets = [a.batch for step in steps for actions in step.ranks for a in actions]
    assert max(offsets) <= depth


def test_nobody_waits_in_the_steady_state() -> None:
    """The paper's units: a trunk of 3, heads of 2, on three devices: 3 units instead of 5."""
    pipeline = fanout_pipeline((0, 1, 2), 3)
    costs = uniform_costs(pipeline, forward=0.5, backward=1.5, teacher=1.0)
    walked = timeline(pipeline, 3, costs)
    assert walked.step_time == pytest.approx(3.0)
    assert walked.bubble_ratio == pytest.approx(0.0, abs=0.01)
    shallow = [timeline(pipeline, depth, costs).step_time for depth in (0, 1, 2, 3)]
    assert shallow == sorted(shallow, reverse=True)
    assert shallow[0] == pytest.approx(5.0)


def test_unequal_heads_are_bound_by_the_busiest_rank() -> None:
    pipeline = fanout_pipeline((0, 1, 1), 2)
    heads = tuple(StageCost(each, 2 * each) for each in (1.0, 0.2, 0.3))
    costs = CostTable(heads, (StageCost(2.0), StageCost(1.0)), 0.0, (0.0,) * 2, (0.0,) * 2)
    assert timeline(pipeline, 2, costs).step_time == pytest.approx(max(1.0 + 3.0, 2.0 + 1.5))


def test_a_rank_without_heads_only_forwards() -> None:
    step = epoch(fanout_pipeline((0,), 2), 2, 5)[1]
    assert [a for a in step.ranks[1] if a.op in {Op.LOSS, Op.FORWARD}] == []
    assert Action.parse("1O") in step.ranks[1]
