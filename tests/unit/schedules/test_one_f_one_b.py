"""Asynchronous 1F1B: as drawn, every batch once, and with the staleness of the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.schedules.one_f_one_b import one_f_one_b
from lightning_tspipe.schedules.registry import lookahead
from lightning_tspipe.schedules.windows import window
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate, steps_seconds
from tests.unit.pipelines import asynchronous_pipeline
from tests.unit.versions import versions


def epoch(pipeline: Pipeline, num_batches: int) -> list[Schedule]:
    return [
        one_f_one_b(pipeline, fresh=n == 0, ahead=num_batches - n - 1) for n in range(num_batches)
    ]


def test_steps_are_as_drawn() -> None:
    first, second, third, last = epoch(asynchronous_pipeline(3), 4)
    assert (
        str(first)
        == "0E 2F0 0L 2B0 0O\n1E 1F0 1F0+1 1B0 1O\n2E 2D 2D+1 2D+2 0F0 0F0+1 0F0+2 0B0 2O"
    )
    assert str(second) == "0E 2F0 0L 2B0 0O\n1E 1F0+1 1B0 1O\n2E 2D+2 0F0+2 0B0 2O"
    assert str(third) == "0E 2F0 0L 2B0 0O\n1E 1F0+1 1B0 1O\n2E 0B0 2O"
    assert str(last) == "0E 2F0 0L 2B0 0O\n1E 1B0 1O\n2E 0B0 2O"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_batches", [1, 2, 3, 12])
@pytest.mark.parametrize("teacher", [0, 1, 2])
def test_every_batch_is_trained_once_with_the_staleness_of_its_stage(
    num_ranks: int, num_batches: int, teacher: int
) -> None:
    pipeline = asynchronous_pipeline(num_ranks, num_calls=2, num_teachers=min(teacher, num_ranks))
    steps = epoch(pipeline, num_batches)
    for step in steps:
        validate(step)
    found = versions(steps)
    forwards = [action for action in found if action.op is Op.FORWARD]
    assert len(forwards) == 2 * num_ranks * num_batches
    for action in forwards:
        behind = num_ranks - 1 - action.stage
        assert found[action] == action.batch - min(action.batch, behind)
        backward = Action(Op.BACKWARD, action.stage, action.unit, action.batch)
        assert found[backward] == action.batch


def test_an_epoch_that_lacks_a_forward_or_has_one_twice_is_refused() -> None:
    steps = epoch(asynchronous_pipeline(2), 4)
    with pytest.raises(ScheduleError, match="twice"):
        versions([steps[0], steps[0], *steps[2:]])
    with pytest.raises(ScheduleError, match="wait for each other"):
        versions([steps[1], *steps[1:]])
    with pytest.raises(ScheduleError, match="behind the last"):
        versions(steps[:2])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("number", [1, 3, 8])
def test_a_window_begins_and_ends_with_an_empty_pipeline(num_ranks: int, number: int) -> None:
    """Narayanan et al., SC 2021, section 2.2: of (m + p - 1) slots, p - 1 are the bubble."""
    pipeline = asynchronous_pipeline(num_ranks)
    steps = epoch(pipeline, number)
    whole = window("1f1b", pipeline, number)
    ends = {Op.EFFECTS, Op.OPTIMIZER, Op.DATA}
    for rank, actions in enumerate(whole.ranks):
        own = [
            replace(a, batch=a.batch + n) for n, step in enumerate(steps) for a in step.ranks[rank]
        ]
        assert [a for a in own if a.op not in ends] == [a for a in actions if a.op not in ends]
    costs = CostTable.uniform(pipeline)
    stage = costs.seconds(Action(Op.FORWARD, 0, 0)) + costs.seconds(Action(Op.BACKWARD, 0, 0))
    slots = number + num_ranks - 1
    assert steps_seconds(steps, costs) == pytest.approx(slots * stage, rel=0.05)
    twice = [*steps, *steps]
    assert set(versions(twice).values()) == set(range(2 * number))


def test_ranks_hear_of_what_they_get_and_no_more() -> None:
    assert lookahead("1f1b", asynchronous_pipeline(1)) == (0,)
    assert lookahead("1f1b", asynchronous_pipeline(4)) == (1, 2, 3, 3)
    assert lookahead("tspipe", asynchronous_pipeline(3, num_teachers=3)) == (1, 1, 1)
    assert lookahead("gpipe", asynchronous_pipeline(3, num_teachers=3)) == (0, 0, 0)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_in_the_steady_state_no_rank_waits(num_ranks: int) -> None:
    pipeline = asynchronous_pipeline(num_ranks)
    costs = CostTable.uniform(pipeline)
    timeline = simulate(list(epoch(pipeline, 20)), costs)
    ends = [
        max(s.end for s in timeline.spans if s.step == step and s.rank == 0) for step in (9, 14)
    ]
    one = costs.seconds(Action(Op.FORWARD, 0, 0)) + costs.seconds(Action(Op.BACKWARD, 0, 0))
    assert (ends[1] - ends[0]) / 5 == pytest.approx(one)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "message"),
    [((0, 1), 1, "one stage"), ((1, 0, 1, 0), 1, "one stage"), ((1, 0), 2, "does not split")],
)
def test_other_placements_are_refused(
    ranks: tuple[int, ...], microbatches: int, message: str
) -> None:
    student = NetworkLayout(ranks, 1, microbatches, frozenset({len(ranks) - 1}))
    with pytest.raises(ScheduleError, match=message):
        one_f_one_b(Pipeline(2, student, None, 1), fresh=True, ahead=0)
