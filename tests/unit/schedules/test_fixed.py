from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Op
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules import tspipe as tspipe_file
from lightning_tspipe.schedules import zero_bubble as zero_bubble_file
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.registry import FIXED, build_step
from lightning_tspipe.schedules.sequential import sequential
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.schedules.zero_bubble import split_backward
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate, steady_step_time
from tests.unit.pipelines import uniform_costs


def drawings(module: object) -> str:
    """The timelines in a docstring, those that stand side by side one after the other."""
    lines = re.findall(r"rank \d \|[^|]*\|", inspect.getdoc(module) or "")
    return "\n".join(lines)


def drawn(schedule: Schedule, *, backward: float = 2.0, steps: int = 1) -> str:
    costs = uniform_costs(schedule.pipeline, backward=backward)
    timeline = simulate([schedule] * steps, costs)
    seconds = timeline.end - timeline.start
    return timeline.draw(2 * round(seconds))


@pytest.mark.parametrize("name", FIXED)
def test_docstring_of_a_fixed_schedule_draws_it(name: str, make_pipeline: Any) -> None:
    file = sys.modules[FIXED[name].__module__]
    expected = drawn(FIXED[name](make_pipeline(3, 1, 2)))
    assert drawings(file) == expected, f"draw this in the docstring of {file.__name__}:\n{expected}"


def test_docstrings_show_what_is_built(make_pipeline: Any) -> None:
    steady = tspipe(make_pipeline(3, 2, 2), teacher_now=False, teacher_next=True)
    assert drawings(tspipe_file) == drawn(steady, backward=1.0)
    whole = gpipe(make_pipeline(2, 1, 2, teacher=False))
    both = drawn(whole).splitlines(), drawn(split_backward(whole, frozenset({1}))).splitlines()
    side_by_side = [row for rows in zip(*both, strict=True) for row in rows]
    assert drawings(zero_bubble_file).splitlines() == side_by_side


def test_sequential_keeps_one_device_busy_at_a_time(make_pipeline: Any) -> None:
    for num_ranks, num_calls, num_microbatches in ((2, 2, 1), (3, 2, 2), (4, 1, 3)):
        pipeline = make_pipeline(num_ranks, num_calls, num_microbatches)
        costs = CostTable.uniform(pipeline)
        spans = simulate([sequential(pipeline)] * 3, costs).spans
        working = sorted((s.start, s.end) for s in spans if s.end > s.start)
        assert all(a[1] <= b[0] for a, b in pairwise(working))
        # Nothing overlaps, so adding ranks doesn't help.
        total = num_ranks * pipeline.student.num_units * 4
        assert steady_step_time(sequential(pipeline), costs) == total


def test_paper_numbers(make_pipeline: Any) -> None:
    # SEMANTICS of the paper's order with equal costs: two views are bubble-free.
    for num_ranks in (2, 3, 4, 8):
        pipeline = make_pipeline(num_ranks, 2, num_ranks - 1)
        costs = uniform_costs(pipeline, backward=1)
        schedule = tspipe(pipeline, teacher_now=False, teacher_next=True)
        assert steady_step_time(schedule, costs) == 3 * pipeline.student.num_units
        # Stage s runs V (u - s) teacher units before its backwards.
        for stage in range(num_ranks):
            cells = schedule.ranks[num_ranks - 1 - stage]
            first = next(n for n, cell in enumerate(cells) if cell.op is Op.BACKWARD)
            early = sum(cell.op is Op.TEACHER for cell in cells[:first])
            assert early == 2 * (num_ranks - 1 - stage)


def test_one_view_is_bubble_free_with_enough_units(make_pipeline: Any) -> None:
    for num_ranks in (2, 3, 4, 8):
        pipeline = make_pipeline(num_ranks, 1, 2 * (num_ranks - 1))
        costs = uniform_costs(pipeline, backward=1)
        schedule = tspipe(pipeline, teacher_now=False, teacher_next=True)
        assert steady_step_time(schedule, costs) == 3 * pipeline.student.num_units


def test_split_keeps_the_order(make_pipeline: Any) -> None:
    schedule = tspipe(make_pipeline(2, 1, 2), teacher_now=False, teacher_next=True)
    assert str(split_backward(schedule, frozenset({1}))) == (
        "0E 1F0 1F1 0L 1I1 1I0 1W1 1W0 1T0+1 1T1+1 0O\n1E 1D 1D+1 0F0 0F1 0T0+1 0T1+1 0B1 0B0 1O"
    )
    assert split_backward(schedule, frozenset()) == schedule
    # Beside a whole backward on the same rank, weights come after both.
    folded = gpipe(make_pipeline(1, 1, 1, num_stages=2, teacher=False))
    assert str(split_backward(folded, frozenset({1}))) == "0E 0D 0F0 1F0 0L 1I0 0B0 1W0 0O"


def test_registry(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 2)
    costs = CostTable.uniform(pipeline)
    build = partial(build_step, pipeline=pipeline, costs=costs, fresh=True, ahead=1)
    assert build("gpipe") == gpipe(pipeline)
    assert build("sequential") == sequential(pipeline)
    with pytest.raises(ScheduleError, match="choose one of tspipe, gpipe, sequential"):
        build("pipedream")
