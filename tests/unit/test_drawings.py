"""The schedules drawn in README and docs are those that the generators make."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_tspipe.ir.lowering import lower
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.one_f_one_b import one_f_one_b
from lightning_tspipe.schedules.registry import build_schedule
from lightning_tspipe.schedules.relay import relay, relay_pipeline
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate, steady_step_time
from lightning_tspipe.simulation.timeline import Timeline

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "schedules.md"]
DRAWING = re.compile(
    r'^```text title="(?P<title>[^"]+)"\n(?P<drawing>.*?)\n```$', re.MULTILINE | re.DOTALL
)

NETWORK = NetworkLayout((2, 1, 0), num_calls=2, num_microbatches=2, output_stages=frozenset({2}))
PIPELINE = Pipeline(3, student=NETWORK, teacher=NETWORK, data_rank=2)
COSTS = CostTable.uniform(PIPELINE)


def step(
    name: str, *, teacher_now: bool, teacher_next: bool = False, is_split: bool = True
) -> Schedule:
    split = frozenset(range(3)) if is_split and name == "tspipe" else frozenset[int]()
    return build_schedule(
        name, PIPELINE, COSTS, teacher_now=teacher_now, teacher_next=teacher_next, split=split
    )


def epoch(*, is_split: bool = True) -> Timeline:
    """First, four steady steps, last."""
    first = step("tspipe", teacher_now=True, teacher_next=True, is_split=is_split)
    steady = step("tspipe", teacher_now=False, teacher_next=True, is_split=is_split)
    last = step("tspipe", teacher_now=False, is_split=is_split)
    return simulate([lower(one) for one in (first, *[steady] * 4, last)], COSTS)


def asynchronous(num_batches: int) -> Timeline:
    """An epoch of a student with one view, and no teacher."""
    student = NetworkLayout((2, 1, 0), 1, 1, frozenset({2}))
    pipeline = Pipeline(3, student=student, teacher=None, data_rank=2)
    steps = [
        one_f_one_b(pipeline, fresh=number == 0, ahead=num_batches - number - 1)
        for number in range(num_batches)
    ]
    return simulate([lower(one) for one in steps], CostTable.uniform(pipeline))


def relayed(*groups: tuple[int, ...]) -> Timeline:
    """Two steps of blocks on groups of ranks."""
    pipeline = relay_pipeline(groups)
    return simulate([lower(relay(pipeline))] * 2, CostTable.uniform(pipeline))


TIMELINES: dict[str, Callable[[], Timeline]] = {
    "sequential": lambda: simulate([lower(step("sequential", teacher_now=True))], COSTS),
    "gpipe": lambda: simulate([lower(step("gpipe", teacher_now=True))], COSTS),
    "tspipe, two steady steps": lambda: epoch().between(2, 3),
    "tspipe, first step": lambda: epoch().between(0, 0),
    "tspipe, last step": lambda: epoch().between(5, 5),
    "1f1b, an epoch of six batches": lambda: asynchronous(6),
    "relay, two steps": lambda: relayed((2,), (1,), (0,)),
    "relay, ranks 1 and 2 share a stage": lambda: relayed((2, 1), (0,)),
    "tspipe, whole backwards": lambda: epoch(is_split=False).between(2, 3),
}
FOUND = [
    pytest.param(match["title"], match["drawing"], id=f"{page.name}: {match['title']}")
    for page in PAGES
    for match in DRAWING.finditer(page.read_text())
]


@pytest.mark.parametrize(("title", "drawing"), FOUND)
def test_drawing_is_what_the_generator_makes(title: str, drawing: str) -> None:
    timeline = TIMELINES[title]()
    drawn = timeline.draw(width=round(2 * (timeline.end - timeline.start)))
    assert drawing == drawn, f"draw this instead:\n{drawn}"


def test_every_drawing_is_shown() -> None:
    assert {parameters.values[0] for parameters in FOUND} == set(TIMELINES)


def test_the_step_times_that_the_page_tells() -> None:
    # In forwards: four of the teacher, four of the student, four backwards of two, and the waiting.
    steady = {"teacher_now": False, "teacher_next": True}
    assert steady_step_time(step("sequential", teacher_now=True), COSTS) == 48
    assert steady_step_time(step("gpipe", teacher_now=True), COSTS) == 22
    assert steady_step_time(step("tspipe", **steady, is_split=False), COSTS) == 18
    assert steady_step_time(step("tspipe", **steady), COSTS) == 16
