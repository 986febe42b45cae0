"""``tspipe simulate`` and ``tspipe timeline``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_tspipe.cli.main import main
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.simulation.timeline import Timeline
from tests.unit.cli.profiles import step_profile


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def saved(path: Path, content: Plan | Timeline) -> Path:
    path.write_text(content.to_json())
    return path


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_simulate_draws(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = saved(tmp_path / "plan.json", step_profile().plan(2))
    trace, image = tmp_path / "trace.json", tmp_path / f"image.{suffix}"
    outputs = ("--trace", trace, "--image", image, "--width", 60)
    assert run("simulate", plan, "--steps", 4, *outputs) == 0
    drawn = capsys.readouterr().out
    assert "rank 0 |" in drawn
    assert "rank 1 |" in drawn
    assert "simulated:" in drawn
    assert "idle, ms per step" in drawn
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"0F0", "1F0", "0L"} <= {event["name"] for event in events}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["simulated"]
    assert image.stat().st_size > 1000


def test_measured_and_simulated_on_one_axis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = step_profile().plan(2)
    plan = saved(tmp_path / "plan.json", made)
    # A "measured" run that takes twice as long as was simulated, drawn from its seventh step on.
    simulated = made.simulate(12)
    spans = (replace(s, start=2 * s.start, end=2 * s.end) for s in simulated.spans)
    measured = Timeline(tuple(spans), 2, simulated.pipeline).between(6, 10)
    recording = saved(tmp_path / "timeline.json", measured)
    trace, image = tmp_path / "trace.json", tmp_path / "both.svg"
    outputs = ("--trace", trace, "--image", image, "--width", 60)
    assert run("timeline", recording, "--plan", plan, *outputs) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "simulated / measured step time: 0.50"
    rows = [line for line in lines if line.startswith("rank 0 |")]
    assert len(rows) == 2
    # The same seconds per column: as many actions in half of the columns.
    lengths = [len(row.partition("|")[2].rstrip("|").strip()) for row in rows]
    assert lengths[0] == pytest.approx(2 * lengths[1], abs=4)
    assert sum(line.startswith("idle, ms per step") for line in lines) == 2
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "measured", 1: "simulated"}
    text = image.read_text()
    assert "measured: " in text
    assert "simulated: " in text


def test_a_recording_that_does_not_know_its_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = step_profile().plan(2)
    plan = saved(tmp_path / "plan.json", made)
    simulated = made.simulate(6)
    recording = saved(tmp_path / "timeline.json", Timeline(simulated.spans, 2))
    assert run("timeline", recording, "--width", 60) == 0
    drawn = capsys.readouterr().out
    assert "idle, ms per step" not in drawn
    assert "--plan plan.json" in drawn
    assert run("timeline", recording, "--plan", plan, "--width", 60) == 0
    drawn = capsys.readouterr().out
    assert drawn.count("idle, ms per step") == 2
    # What was "measured" is the simulation itself.
    assert "simulated / measured step time: 1.00" in drawn


def test_a_page_is_written_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = step_profile().plan(2)
    recording = saved(tmp_path / "timeline.json", made.simulate_recording(4))
    plan = saved(tmp_path / "plan.json", made)
    shown: list[str] = []

    def show(url: str) -> bool:
        shown.append(url)
        return len(shown) == 1

    monkeypatch.setattr("webbrowser.open", show)
    assert run("timeline", recording, "--plan", plan, "--open", "--width", 60) == 0
    page = tmp_path / "timeline.html"
    assert f"page: {page}" in capsys.readouterr().out.splitlines()
    assert shown == [page.as_uri()]
    text = page.read_text(encoding="utf-8")
    assert '"name":"measured"' in text
    assert '"name":"simulated"' in text
    # Where there is no browser, the file can be taken to one.
    elsewhere = tmp_path / "page.html"
    assert run("simulate", plan, "--page", elsewhere, "--open", "--width", 60) == 0
    assert "no browser was found" in capsys.readouterr().out.splitlines()[-1]
    assert "simulated" in elsewhere.read_text(encoding="utf-8")
    # Only written, not shown.
    assert run("simulate", plan, "--page", elsewhere, "--width", 60) == 0
    assert len(shown) == 2
