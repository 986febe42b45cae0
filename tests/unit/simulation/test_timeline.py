from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.simulation.timeline import Pause, Span, Timeline, aligned
from lightning_tspipe.simulation.trace import chrome_trace


def rank_of_steps(rank: int, shift: float, num_steps: int) -> list[Span]:
    """Steps of 10 seconds, of which 8 are work."""
    return [
        Span(
            rank, f"{rank}{name}", name[0], step, shift + 10 * step + start, shift + 10 * step + end
        )
        for step in range(num_steps)
        for name, start, end in (("F0", 0.0, 3.0), ("B0", 3.0, 8.0))
    ]


TIMELINE = Timeline((*rank_of_steps(1, 0.0, 4), *rank_of_steps(0, 3.0, 4)), num_ranks=2)


def test_steady_window_belongs_to_each_rank() -> None:
    assert TIMELINE.windows == ((11.0, 31.0), (8.0, 28.0))
    assert TIMELINE.step_time == 10.0
    assert TIMELINE.busy(0) == TIMELINE.busy(1) == 16.0
    assert TIMELINE.bubble_ratio == pytest.approx(0.2)


def test_with_few_steps_the_window_is_everything() -> None:
    timeline = TIMELINE.between(0, 1)
    assert timeline.steps == (0, 1)
    assert timeline.windows == ((0.0, 21.0), (0.0, 21.0))
    assert timeline.step_time == 10.5
    assert timeline.bubble_ratio == pytest.approx(1 - 32 / 42)


def test_nothing() -> None:
    empty = Timeline((), num_ranks=2)
    assert (empty.step_time, empty.bubble_ratio, empty.steps) == (0.0, 0.0, ())
    assert empty.draw(4) == "rank 0 |    |\nrank 1 |    |"


def test_drawing() -> None:
    assert TIMELINE.between(0, 0).draw(11) == "rank 0 |   F0─B0───|\nrank 1 |F0─B0───   |"
    ahead = Timeline((Span(0, "1T12+1", "T", 0, 0.0, 4.0), Span(0, "0L", "L", 0, 4.0, 5.0)), 1)
    assert ahead.draw(10) == "rank 0 |t12─────L─|"
    assert ahead.draw(5) == "rank 0 |t12─L|"
    assert ahead.draw(2) == "rank 0 |t─|"


def test_drawing_a_part() -> None:
    timeline = TIMELINE.between(0, 0)
    assert timeline.draw(8, (3.0, 11.0)) == "rank 0 |F0─B0───|\nrank 1 |B0───   |"
    assert timeline.draw(6, (-3.0, 3.0)) == "rank 0 |      |\nrank 1 |   F0─|"


def test_aligned_parts_are_equally_long_and_their_steady_steps_stand_below_each_other() -> None:
    other = Timeline(tuple(rank_of_steps(0, 100.0, 5)), 1)
    parts = aligned([TIMELINE, other])
    assert (TIMELINE.steady_start, other.steady_start) == (10.0, 110.0)
    assert parts == [(0.0, 48.0), (100.0, 148.0)]
    assert aligned([TIMELINE]) == [(TIMELINE.start, TIMELINE.end)]
    assert aligned([]) == []


def test_trace_events() -> None:
    events = chrome_trace({"run": TIMELINE}, {})["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["run", "rank 0", "rank 1"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 16
    assert spans[3] == {
        "name": "1B0", "cat": "B", "ph": "X", "pid": 0, "tid": 1,
        "ts": 13e6, "dur": 5e6, "args": {"step": 1},
    }  # fmt: skip


@pytest.mark.parametrize("teacher", [True, False])
def test_json(make_pipeline: Any, teacher: bool) -> None:
    assert Timeline.from_json(TIMELINE.to_json()) == TIMELINE
    pipeline = make_pipeline(2, 2, 3, teacher=teacher, outputs=frozenset({0}))
    full = Timeline(TIMELINE.spans, 2, pipeline, (Pause(0, "load", 1.0, 2.0),))
    assert Timeline.from_json(full.to_json()) == full


def test_json_of_earlier_versions() -> None:
    data = json.loads(TIMELINE.to_json())
    old = {name: data[name] for name in ("num_ranks", "spans")}
    assert Timeline.from_json(json.dumps(old)) == TIMELINE


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"spans": [1], "num_ranks": 1}'])
def test_json_of_something_else(text: str) -> None:
    with pytest.raises(ConfigurationError, match="not a timeline"):
        Timeline.from_json(text)


def test_what_was_read_is_drawn_where_there_is_room() -> None:
    spans = (
        Span(0, "1F0+1", "F", 4, 0.0, 1.0, version=3, predicted=1),
        Span(0, "1B0", "B", 4, 1.0, 3.0, version=4),
        Span(0, "1F0+1", "F", 5, 3.0, 4.0, version=4, predicted=1),
    )
    timeline = Timeline(spans, 1)
    assert timeline.draw(32) == "rank 0 |F5v3~1──B4v4────────────F6v4~1──|"
    assert timeline.draw(8) == "rank 0 |F5B4v4F6|"
    assert [span.read for span in spans] == ["v3~1", "v4", "v4~1"]
    assert Timeline.from_json(timeline.to_json()).spans == spans
    assert chrome_trace({"run": timeline}, {})["traceEvents"][2]["args"] == {
        "step": 4,
        "reads": "v3~1",
    }
