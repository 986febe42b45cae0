from __future__ import annotations

import builtins
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plots import plot_timelines
from lightning_tspipe.simulation.timeline import Span, Timeline


@pytest.fixture
def timeline() -> Timeline:
    spans = []
    for step in range(3):
        for rank in range(2):
            at = step * 1.0 + 0.1 * rank
            for action in (f"{rank}F0", f"{rank}F1", f"{rank}B1", f"{rank}T0+1", f"{rank}O"):
                op = action[1]
                spans.append(Span(rank, action, op, step, at, at + 0.15))
                at += 0.18
            spans.append(Span(rank, f"{rank}E", "E", step, at, at))  # takes no time: has no bar
    return Timeline(tuple(spans), 3)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_draws_ranks_units_and_a_legend(timeline: Timeline, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"timeline.{suffix}"
    plot_timelines({"": timeline}, path)
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
        return
    for text in ("rank 0", "rank 2", "teacher forward, next batch", "optimizer", "ms per step"):
        assert text.encode() in content
    assert b"loss" not in content
    assert b"effects" not in content


def test_two_timelines_share_one_axis(timeline: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    slower = [replace(span, start=2 * span.start, end=2 * span.end) for span in timeline.spans]
    path = tmp_path / "both.svg"
    plot_timelines({"measured": timeline, "simulated": Timeline(tuple(slower), 2)}, path)
    content = path.read_text()
    for text in ("measured: ", "simulated: ", "0: the first steady step begins"):
        assert text in content
    # Five ranks, one legend, and one row of numbers.
    assert content.count(">rank ") == 5
    assert content.count(">teacher forward, next batch<") == 1
    # A tick; in each drawing, two actions on unit 0, of two ranks in three steps.
    assert content.count(">0<") == 1 + 2 * (2 * 2 * 3)
    assert content == svg_again(path, timeline, Timeline(tuple(slower), 2))


def svg_again(path: Path, measured: Timeline, simulated: Timeline) -> str:
    again = path.with_name("again.svg")
    plot_timelines({"measured": measured, "simulated": simulated}, again)
    return again.read_text()


def test_a_format_that_nobody_draws(timeline: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match=r"write \.png, \.svg or \.pdf"):
        plot_timelines({"": timeline}, tmp_path / "timeline.txt")


def test_leaves_pyplot_and_the_backend_alone(timeline: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sys.modules.pop("matplotlib.pyplot", None)
    plot_timelines({"a run": timeline}, tmp_path / "timeline.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_an_empty_timeline(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no spans"):
        plot_timelines({"": Timeline((), 2)}, tmp_path / "timeline.png")


def test_without_matplotlib(
    timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match="pip install"):
        plot_timelines({"": timeline}, tmp_path / "timeline.png")
