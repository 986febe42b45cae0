"""Schedules as they were looked at and found right; ``UPDATE_GOLDEN=1`` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_tspipe.ir.lowering import lower
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.schedules.registry import SCHEDULES, build_schedule, runs_ahead
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate

GOLDEN = Path(__file__).parents[2] / "golden"
NUM_STEPS = 3


def page(name: str, pipeline: Pipeline, split: frozenset[int]) -> str:
    """The steps of an epoch of three batches, and their timeline: two columns per second."""
    costs = CostTable.uniform(pipeline)
    ahead = runs_ahead(name)
    steps = [
        build_schedule(
            name,
            pipeline,
            costs,
            teacher_now=batch == 0 or not ahead,
            teacher_next=ahead and batch < NUM_STEPS - 1,
            split=split,
        )
        for batch in range(NUM_STEPS)
    ]
    timeline = simulate(list(map(lower, steps)), costs)
    titles = ["first", "middle", "last"] if ahead else ["every"]
    grids = [f"{title}\n{step}" for title, step in zip(titles, steps, strict=False)]
    return "\n\n".join([*grids, timeline.draw(2 * round(timeline.end))]) + "\n"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_golden(make_pipeline: Any, num_stages: int, num_calls: int, name: str) -> None:
    found = []
    for num_microbatches in (1, 2):
        pipeline = make_pipeline(num_stages, num_calls, num_microbatches)
        for split in dict.fromkeys([frozenset[int](), frozenset(range(1, num_stages))]):
            if name == "tspipe" or not split:
                halves = f", halves on {sorted(split)}" if split else ""
                found.append(f"# micro-batches: {num_microbatches}{halves}")
                found.append(page(name, pipeline, split))
    text = "\n".join(found)
    file = GOLDEN / f"{name}-{num_stages}-stages-{num_calls}-views.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert file.read_text() == text


def test_no_golden_is_left_over() -> None:
    expected = {
        f"{name}-{num_stages}-stages-{num_calls}-views.txt"
        for name in SCHEDULES
        for num_stages in (1, 2, 3, 4)
        for num_calls in (1, 2)
    }
    assert {file.name for file in GOLDEN.iterdir()} == expected
