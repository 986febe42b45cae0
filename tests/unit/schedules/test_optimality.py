"""What list scheduling finds, beside what is possible: all orders, and the fill condition."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import depends_on
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.planning.bounds import cycle_seconds
from lightning_tspipe.schedules.synthesis import synthesize
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.schedules.zero_bubble import split_backward
from lightning_tspipe.simulation.cost import CostTable, StageCost
from lightning_tspipe.simulation.simulator import steady_step_time
from tests.unit.pipelines import uniform_costs


def steady(pipeline: Pipeline, costs: CostTable, split: frozenset[int] = frozenset()) -> Schedule:
    schedule = synthesize(pipeline, costs, teacher_now=False, teacher_next=True, split=split)
    validate(schedule)
    return schedule


def interleavings(queues: list[list[Action]], needs: dict[Action, set[Action]]) -> Iterator[Any]:
    """All orders in which each queue keeps its own, and everything comes after what it needs."""
    if not any(queues):
        yield ()
        return
    left = {action for queue in queues for action in queue}
    for index, queue in enumerate(queues):
        if queue and not needs[queue[0]] & left:
            rest = [*queues[:index], queue[1:], *queues[index + 1 :]]
            for order in interleavings(rest, needs):
                yield (queue[0], *order)


def all_orders(fixed: Schedule) -> Iterator[Schedule]:
    """Every order of a step whose units follow each other on each stage as in ``fixed``.

    Units are alike, so another order of units is the same with other names.
    """
    ranks = []
    for actions in fixed.ranks:
        body = [a for a in actions if a.op not in {Op.EFFECTS, Op.DATA, Op.OPTIMIZER}]
        queues: dict[tuple[Op, int], list[Action]] = {}
        for action in body:
            queues.setdefault((action.op, action.stage), []).append(action)
        needs = {
            action: {need.producer for need in depends_on(action, fixed.pipeline, fixed.split)}
            for action in body
        }
        # A backward waits for the loss, which waits for all forwards, wherever it is.
        forwards = {action for action in body if action.op is Op.FORWARD}
        for action in body:
            if action.op in {Op.BACKWARD, Op.INPUT_BACKWARD}:
                needs[action] |= forwards
        opening = tuple(a for a in actions if a.op in {Op.EFFECTS, Op.DATA})
        ranks.append(
            [(*opening, *order, actions[-1]) for order in interleavings([*queues.values()], needs)]
        )
    for chosen in product(*ranks):
        yield Schedule(fixed.pipeline, chosen)


def optimum(pipeline: Pipeline, costs: CostTable, split: frozenset[int] = frozenset()) -> float:
    fixed = split_backward(tspipe(pipeline, teacher_now=False, teacher_next=True), split)
    best = math.inf
    for schedule in all_orders(fixed):
        try:
            best = min(best, steady_step_time(schedule, costs))
        except ScheduleError:  # these two orders wait for each other
            continue
    return best


def drawn_costs(pipeline: Pipeline, number: random.Random) -> CostTable:
    def stages(count: int) -> tuple[StageCost, ...]:
        return tuple(
            StageCost(
                *(number.randint(1, 8) / 4 for _ in range(4)),
                *(number.randint(0, 9) for _ in range(2)),
            )
            for _ in range(count)
        )

    return replace(
        CostTable.uniform(pipeline),
        student=stages(pipeline.num_ranks),
        teacher=stages(pipeline.num_ranks),
        latency=number.choice([0.0, 0.5]),
        bandwidth=number.choice([10.0, math.inf]),
    )


@pytest.mark.parametrize(
    ("num_ranks", "num_units"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow), (3, 1)]
)
def test_beside_all_orders(make_pipeline: Any, num_ranks: int, num_units: int) -> None:
    """A heuristic: nearly always the best order, and never far from it, however costs differ."""
    pipeline = make_pipeline(num_ranks, 1, num_units)
    number = random.Random(0)  # noqa: S311 - cases, not secrets
    ratios = []
    for _ in range(40):
        costs = drawn_costs(pipeline, number)
        best = optimum(pipeline, costs)
        assert max(cycle_seconds(pipeline, costs)) <= best + 1e-9
        ratios.append(steady_step_time(steady(pipeline, costs), costs) / best)
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 0.9 * len(ratios)
    # Of 1,441 cases drawn once, 1 % were more than 1.1 and the worst 1.28: three ranks, one unit.
    assert max(ratios) <= 1.3


@pytest.mark.parametrize("teacher", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("latency", [0.0, 0.75])
def test_halves_beside_all_orders(make_pipeline: Any, teacher: float, latency: float) -> None:
    pipeline, split = make_pipeline(2, 1, 2), frozenset({1})
    costs = uniform_costs(pipeline, teacher=teacher, latency=latency)
    found = steady_step_time(steady(pipeline, costs, split), costs)
    assert found == pytest.approx(optimum(pipeline, costs, split))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("teacher", [0.25, 0.5, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_no_bubble_where_the_fill_condition_holds(
    make_pipeline: Any, num_ranks: int, num_calls: int, teacher: float, halves: bool
) -> None:
    # From stage to stage the way of a unit to the loss and back grows by a forward and a backward,
    # which whole teacher units fill; and a teacher that is slower than the student reaches the next
    # stage a teacher forward later.
    split = frozenset(range(1, num_ranks)) if halves else frozenset[int]()
    way = max(1, teacher) + (1 if halves else 2)
    num_units = (num_ranks - 1) * math.ceil(way / teacher)
    pipeline = make_pipeline(num_ranks, num_calls, math.ceil(num_units / num_calls))
    costs = uniform_costs(pipeline, teacher=teacher)
    busy = pipeline.student.num_units * (3 + teacher)
    assert max(cycle_seconds(pipeline, costs, split)) <= busy
    assert busy / steady_step_time(steady(pipeline, costs, split), costs) >= 0.99


@pytest.mark.slow
def test_where_a_slow_teacher_leaves_a_bubble_every_order_has_it(make_pipeline: Any) -> None:
    # The teacher has work enough for the way there and back, but comes too late to the last stage.
    pipeline = make_pipeline(3, 1, 2)
    costs = uniform_costs(pipeline, teacher=4)
    busy = 2 * (3 + 4)
    assert max(cycle_seconds(pipeline, costs)) < busy
    found = steady_step_time(steady(pipeline, costs), costs)
    assert found == optimum(pipeline, costs) > busy


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_there_is_a_bubble_where_the_fill_condition_fails(
    make_pipeline: Any, num_ranks: int, num_calls: int
) -> None:
    pipeline = make_pipeline(num_ranks, num_calls, 1)
    costs = uniform_costs(pipeline, teacher=0.25)
    (*_, first), busy = sorted(cycle_seconds(pipeline, costs)), num_calls * 3.25
    assert first > busy
    assert steady_step_time(steady(pipeline, costs), costs) >= first
