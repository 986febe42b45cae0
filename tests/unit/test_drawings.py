"""The schedules drawn in README and docs are those that the generators make."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lightning_tspipe.ir.action import Action
from lightning_tspipe.ir.pipeline import Coupling, NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.one_f_one_b import one_f_one_b
from lightning_tspipe.schedules.registry import FIXED, build_step
from lightning_tspipe.schedules.relay import relay, relay_pipeline
from lightning_tspipe.schedules.window_steps import When, WindowSteps
from lightning_tspipe.schedules.windows import window, window_ranks
from lightning_tspipe.simulation.cost import CostTable, StageCost
from lightning_tspipe.simulation.simulator import simulate, steady_step_time
from lightning_tspipe.simulation.timeline import Span, Timeline

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "schedules.md", DOCS / "guide" / "relay.md"]
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
    return build_step(
        name, PIPELINE, COSTS, fresh=teacher_now, ahead=int(teacher_next), split=split
    )


def epoch(*, is_split: bool = True) -> Timeline:
    """First, four steady steps, last."""
    first = step("tspipe", teacher_now=True, teacher_next=True, is_split=is_split)
    steady = step("tspipe", teacher_now=False, teacher_next=True, is_split=is_split)
    last = step("tspipe", teacher_now=False, is_split=is_split)
    return simulate([first, *[steady] * 4, last], COSTS)


def fixed(name: str) -> Timeline:
    """One step of an order that does not depend on costs."""
    return simulate([step(name, teacher_now=True)], COSTS)


def asynchronous(num_batches: int) -> Timeline:
    """An epoch of a student with one view, and no teacher."""
    student = NetworkLayout((2, 1, 0), 1, 1, frozenset({2}))
    pipeline = Pipeline(3, student=student, teacher=None, data_rank=2)
    steps = [
        one_f_one_b(pipeline, fresh=number == 0, ahead=num_batches - number - 1)
        for number in range(num_batches)
    ]
    return simulate(steps, CostTable.uniform(pipeline))


def windows(
    name: str, num_stages: int, number: int, num_batches: int, *, is_split: bool = False
) -> Timeline:
    """Windows of batches on three ranks."""
    ranks = window_ranks(name, num_stages, 3)
    network = NetworkLayout(ranks, 1, 1, frozenset({num_stages - 1}))
    pipeline = Pipeline(3, network, None, data_rank=ranks[0])
    split = frozenset(range(1, num_stages)) if is_split else frozenset[int]()
    whole = window(name, pipeline, num_batches, split=split)
    made = simulate([whole] * number, CostTable.uniform(pipeline))
    return replace(made, spans=tuple(_by_batch(span, 3) for span in made.spans))


def taught(when: When) -> Timeline:
    """Two windows of four batches with a teacher on three ranks, when the pipeline is full."""
    ranks = window_ranks("1f1b", 3, 3)
    network = NetworkLayout(ranks, 1, 1, frozenset({2}))
    pipeline = Pipeline(3, network, network, data_rank=2)
    made = simulate(
        WindowSteps("1f1b", pipeline, when, 4).windows(4, 4), CostTable.uniform(pipeline)
    )
    return replace(made, spans=tuple(map(_by_window, made.spans))).between(2, 3)


def _by_window(span: Span) -> Span:
    """With the number of its batch; in small letters of the next window."""
    action = Action.parse(span.action)
    if action.unit is None:
        return span
    of, is_next = Action(action.op, action.stage, action.batch % 4), action.batch >= 4
    return replace(span, action=str(of), op=span.op.lower() if is_next else span.op)


def _by_batch(span: Span, num_ranks: int) -> Span:
    """With the number of its batch; in small letters of a rank's second stage."""
    action = Action.parse(span.action)
    if action.unit is None:
        return span
    of = Action(action.op, action.stage, action.batch)
    return replace(span, action=str(of), op=span.op if of.stage < num_ranks else span.op.lower())


def relayed(*groups: tuple[int, ...]) -> Timeline:
    """Two steps of blocks on groups of ranks."""
    pipeline = relay_pipeline(groups)
    return simulate([relay(pipeline)] * 2, CostTable.uniform(pipeline))


def one_by_one(*timelines: Timeline) -> Timeline:
    """Each begins when all ranks have ended the one before."""
    spans: list[Span] = []
    for timeline in timelines:
        start = max((span.end for span in spans), default=0.0)
        spans += [replace(s, start=s.start + start, end=s.end + start) for s in timeline.spans]
    return replace(timelines[0], spans=tuple(spans))


def waiting_for_all() -> Timeline:
    """Two steps with a barrier behind each."""
    step = relay(relay_pipeline([(2,), (1,), (0,)]))
    return one_by_one(*[simulate([step], CostTable.uniform(step.pipeline))] * 2)


def layer_wise() -> Timeline:
    """Each rank runs the teacher up to its own blocks."""
    pipeline = relay_pipeline([(2,), (1,), (0,)], is_relayed=False)
    teacher = tuple(StageCost(forward) for forward in (1.0, 2.0, 3.0))
    costs = replace(CostTable.uniform(pipeline), teacher=teacher)
    return simulate([relay(pipeline)] * 2, costs)


def data_parallel() -> Timeline:
    """One step: all ranks train one block after the other, each time with the teacher up to it."""
    pipeline = relay_pipeline([(2, 1, 0)], is_relayed=False)
    step, costs = relay(pipeline), CostTable.uniform(pipeline)
    return one_by_one(
        *(simulate([step], replace(costs, teacher=(StageCost(n),))) for n in (1.0, 2.0, 3.0))
    )


def behind_a_frozen_part() -> Timeline:
    """Two steady steps of a student whose first half is frozen."""
    frozen = NetworkLayout((2, 1, 0), 1, 4, frozenset())
    trained = NetworkLayout((2, 1, 0), 1, 4, frozenset({2}))
    pipeline = Pipeline(3, trained, frozen, data_rank=2, coupling=Coupling.PREFIX)
    costs = CostTable.uniform(pipeline)
    steps = [
        build_step("tspipe", pipeline, costs, fresh=number == 0, ahead=min(1, 4 - number))
        for number in range(5)
    ]
    return simulate(steps, costs).between(2, 3)


TIMELINES: dict[str, Callable[[], Timeline]] = {
    **{name: partial(fixed, name) for name in FIXED},
    "tspipe, two steady steps": lambda: epoch().between(2, 3),
    "tspipe, first step": lambda: epoch().between(0, 0),
    "tspipe, last step": lambda: epoch().between(5, 5),
    "1f1b, an epoch of six batches": lambda: asynchronous(6),
    "1f1b, two windows of four batches": lambda: windows("1f1b", 3, 2, 4),
    "1f1b in halves, two windows of four batches": lambda: windows("1f1b", 3, 2, 4, is_split=True),
    "1f1b with a teacher that changes, two windows": lambda: taught("now"),
    "1f1b with a frozen teacher, two windows": lambda: taught("ahead"),
    "interleaved, a window of six batches": lambda: windows("interleaved", 6, 1, 6),
    "zbv, a window of six batches": lambda: windows("zbv", 6, 1, 6),
    "prefix, two steady steps": behind_a_frozen_part,
    "relay, two steps": lambda: relayed((2,), (1,), (0,)),
    "relay, ranks 1 and 2 share a stage": lambda: relayed((2, 1), (0,)),
    "relay, all wait for each other": waiting_for_all,
    "relay, all share one stage": lambda: relayed((2, 1, 0)),
    "layer-wise, two steps": layer_wise,
    "data parallel, one step": data_parallel,
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
    shown = {parameters.values[0] for parameters in FOUND}
    assert shown == set(TIMELINES), f"draw on docs/schedules.md: {TIMELINES.keys() - shown}"


def test_the_step_times_that_the_page_tells() -> None:
    # In forwards: four of the teacher, four of the student, four backwards of two, and the waiting.
    steady = {"teacher_now": False, "teacher_next": True}
    assert steady_step_time(step("sequential", teacher_now=True), COSTS) == 48
    assert steady_step_time(step("gpipe", teacher_now=True), COSTS) == 22
    assert steady_step_time(step("tspipe", **steady, is_split=False), COSTS) == 18
    assert steady_step_time(step("tspipe", **steady), COSTS) == 16


def test_the_stage_maps_of_freezing_are_what_their_snippet_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs/guide/freezing.md").read_text(encoding="utf-8")
    shown = next(
        m["drawing"] for m in DRAWING.finditer(page) if m["title"].startswith("stage maps")
    )
    (snippet,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "draw(" in block
    )
    exec(snippet, {})  # noqa: S102 - a page of ours
    assert capsys.readouterr().out.split() == shown.split()
