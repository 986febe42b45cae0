"""Schedules as they were looked at and found right; ``UPDATE_GOLDEN=1`` writes them anew.

A page has the steps of an epoch and their timeline. What is equal from one batch to the next is
drawn once::

    tspipe    first | middle      | last
    1f1b      first | middle      | last but 1 | last       the pipeline runs empty
    gpipe     every
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from pathlib import Path

import pytest

from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.schedules.registry import ASYNCHRONOUS, FIXED, SCHEDULES, build_step
from lightning_tspipe.schedules.relay import relay, relay_pipeline
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import simulate
from tests.unit.pipelines import asynchronous_pipeline, fanout_pipeline, make_pipeline

GOLDEN = Path(__file__).parents[2] / "golden"
Sections = Iterator[tuple[str, list[Schedule]]]
"""Titles, and the steps of an epoch."""


def epoch(
    name: str,
    pipeline: Pipeline,
    num_batches: int = 3,
    *,
    split: frozenset[int] = frozenset(),
    depth: int = 1,
) -> list[Schedule]:
    """All steps between two drains."""
    build = partial(build_step, name, pipeline, CostTable.uniform(pipeline), split=split)
    if name in FIXED:  # every step starts from nothing and leaves nothing
        return [build(fresh=True, ahead=0)] * num_batches
    return [
        build(fresh=batch == 0, ahead=num_batches - 1 - batch, depth=depth)
        for batch in range(num_batches)
    ]


def draw(steps: list[Schedule]) -> str:
    """The steps of an epoch, and their timeline: two columns per second."""
    for step in steps:
        validate(step)
    timeline = simulate(steps, CostTable.uniform(steps[0].pipeline))
    grids = [(grid, len(list(same))) for grid, same in groupby(map(str, steps))]
    left, pages = len(steps), []
    for number, (grid, count) in enumerate(grids):
        left -= count
        pages.append(f"{_title(number, len(grids), count, left)}\n{grid}")
    return "\n\n".join([*pages, timeline.draw(2 * round(timeline.end))]) + "\n"


def _title(number: int, of: int, count: int, left: int) -> str:
    if of == 1:
        return "every"
    if number == 0:
        return "first"
    if left == 0:
        return "last" if count == 1 else f"last {count}"
    return "middle" if number == 1 else f"last but {left}"


def synchronous(name: str, num_stages: int, num_calls: int) -> Sections:
    for num_microbatches in (1, 2):
        pipeline = make_pipeline(num_stages, num_calls, num_microbatches)
        for split in dict.fromkeys([frozenset[int](), frozenset(range(1, num_stages))]):
            if name == "tspipe" or not split:
                halves = f", halves on {sorted(split)}" if split else ""
                title = f"micro-batches: {num_microbatches}{halves}"
                yield title, epoch(name, pipeline, split=split)


def fed() -> Sections:
    for name in SCHEDULES:
        yield name, epoch(name, replace(make_pipeline(3, 1, 2), is_fed=True))


def asynchronous(num_ranks: int, num_calls: int) -> Sections:
    for num_teachers in range(min(num_ranks, 2) + 1):
        pipeline = asynchronous_pipeline(num_ranks, num_calls=num_calls, num_teachers=num_teachers)
        yield f"stages of a teacher: {num_teachers}", epoch(ASYNCHRONOUS, pipeline, num_ranks + 2)


def fanned(num_ranks: int, num_heads: int) -> Sections:
    pipeline = fanout_pipeline(tuple(head % num_ranks for head in range(num_heads)), num_ranks)
    for depth in (0, 1, 2, num_ranks + 1) if num_ranks > 1 else (0,):
        yield f"depth: {depth}", epoch("tspipe", pipeline, depth + 3, depth=depth)


def relayed(*widths: int) -> Sections:
    ranks = iter(reversed(range(sum(widths))))
    groups = [tuple(next(ranks) for _ in range(width)) for width in widths]
    for is_relayed, title in ((True, "relayed"), (False, "every stage reads the batch")):
        yield title, [relay(relay_pipeline(groups, is_relayed=is_relayed))] * 3


PAGES: dict[str, Callable[[], Sections]] = {
    f"{name}-{num_stages}-stages-{num_calls}-views": partial(
        synchronous, name, num_stages, num_calls
    )
    for name, num_stages, num_calls in product(SCHEDULES, (1, 2, 3, 4), (1, 2))
}
PAGES["fed-3-stages"] = fed
PAGES |= {
    f"1f1b-{num_ranks}-stages-{num_calls}-views": partial(asynchronous, num_ranks, num_calls)
    for num_ranks, num_calls in product((1, 2, 3, 4), (1, 2))
}
PAGES |= {
    f"fanout-{num_ranks}-ranks-{num_heads}-heads": partial(fanned, num_ranks, num_heads)
    for num_ranks, num_heads in ((1, 2), (2, 1), (2, 3), (3, 3), (4, 6))
}
PAGES |= {
    f"relay-{'-'.join(map(str, widths))}-ranks": partial(relayed, *widths)
    for widths in ((1,), (2,), (1, 1), (2, 1), (1, 2), (1, 1, 1), (2, 2), (1, 3, 1))
}


@pytest.mark.parametrize("name", PAGES)
def test_golden(name: str) -> None:
    text = "\n".join(f"# {title}\n{draw(steps)}" for title, steps in PAGES[name]())
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert file.read_text() == text


def test_no_golden_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == PAGES.keys()
