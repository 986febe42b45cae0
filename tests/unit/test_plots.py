from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plots import plot_timeline
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
    return Timeline(tuple(spans), 3)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_draws_ranks_units_and_a_legend(timeline: Timeline, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"timeline.{suffix}"
    plot_timeline(timeline, path)
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
        return
    for text in ("rank 0", "rank 2", "teacher forward, next batch", "optimizer", "ms per step"):
        assert f"<!-- {text}".encode() in content or text.encode() in content
    assert b"loss" not in content


def test_leaves_pyplot_and_the_backend_alone(timeline: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sys.modules.pop("matplotlib.pyplot", None)
    plot_timeline(timeline, tmp_path / "timeline.png", title="a run")
    assert "matplotlib.pyplot" not in sys.modules


def test_an_empty_timeline(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no spans"):
        plot_timeline(Timeline((), 2), tmp_path / "timeline.png")


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
        plot_timeline(timeline, tmp_path / "timeline.png")
