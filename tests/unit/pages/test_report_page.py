"""The page of a report: every part, and what stands in its place where one is missing."""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_tspipe.pages.report import Report
from lightning_tspipe.plots import Curve
from tests.browser import browser
from tests.unit.cli.profiles import step_profile

PLAN = step_profile().plan(2)


def curve(*values: float) -> Curve:
    steps = tuple(range(0, 10 * len(values), 10))
    return Curve(steps, tuple(2.0 * step for step in steps), values)


WHOLE = Report(
    title="BYOL",
    outcome="finished",
    facts={"ended": "2026-11-29 12:00, after 0:01:02", "command": "python train.py --lr '1 <2'"},
    curves={
        "samples_per_second": curve(900.0, 1234.4),
        "peak_memory": curve(400.0, 500.0),
        "peak_memory/rank0": curve(300.0, 310.0),
        "peak_memory/rank1": curve(400.0, 500.0),
        "val_knn_top1": curve(0.5, 0.875),
        "train_probe_loss": curve(2.0, 1.0),
    },
    plan=PLAN,
    table="rank  stage",
    timeline=PLAN.simulate_recording(5),
)


def test_everything_is_on_one_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.html"
    path.write_text(WHOLE.to_html(), encoding="utf-8")
    with browser(tmp_path) as chromium:
        page = chromium.open(path)
        text = page.js("document.body.innerText")
        headings = page.js("[...document.querySelectorAll('h2')].map(each => each.innerText)")
        drawn = page.js("[...document.querySelectorAll('svg')].map(each => each.clientWidth)")
        rows = page.js("[...document.querySelectorAll('table')].map(each => each.innerText)")
        # The wheel scrolls the page, until the drawing is clicked into.
        box = "document.querySelector('canvas').getBoundingClientRect()"
        spot = f"(box => [box.x + 300, box.y + 10])({box})"
        page.js("document.querySelector('canvas').scrollIntoView()")
        before = page.js("document.querySelector('.shown').innerText")
        x, y = page.js(spot)
        page.wheel(x, y, -200)
        assert page.js("document.querySelector('.shown').innerText") == before
        page.js("document.querySelector('canvas').scrollIntoView()")
        x, y = page.js(spot)
        page.drag((x, y), (x, y))
        page.wheel(x, y, -200)
        assert page.js("document.querySelector('.shown').innerText") != before
        assert not page.problems
    assert headings == [
        "Plan", "Timeline", "Throughput", "Memory", "Accuracy", "Loss", "How it ran",
    ]  # fmt: skip
    for part in ("1,234", "524.3 MB", "0.875", "python train.py --lr '1 <2'", "simulated from"):
        assert part in text
    assert len(drawn) == 4  # throughput, memory, accuracy, loss
    assert min(drawn) > 600
    # Memory as it was planned, and as it was measured on each rank.
    assert "measured peak" in rows[0]
    assert "325.1 MB" in rows[0].splitlines()[1]
    assert "524.3 MB" in rows[0].splitlines()[2]


def test_what_is_missing_is_said() -> None:
    absent = {"Plan": "no plan <here>", "Timeline": "no steps", "Accuracy": "add an evaluator"}
    page = Report(
        title="M", outcome="failed: x", details="a\n<b>", facts={}, absent=absent
    ).to_html()
    for text in ("no plan &lt;here&gt;", "no steps", "add an evaluator", "a\n&lt;b&gt;"):
        assert text in page
    assert page.count("Nothing was logged.") == 3
    assert "<svg" not in page
    # A plan without a recording is drawn alone.
    page = replace(WHOLE, timeline=None, absent=absent).to_html()
    assert "no steps" in page
    assert "simulated from the plan" in page


def test_without_matplotlib_there_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    page = WHOLE.to_html()
    assert "pip install lightning-tspipe[plots]" in page
    assert "0.875" in page
    assert "<svg" not in page
