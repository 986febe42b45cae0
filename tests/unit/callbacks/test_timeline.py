from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_tspipe.callbacks import PipelineTimeline
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.simulation.timeline import Span, Timeline

MEASURED = Timeline((Span(0, "0F0", "F", 0, 0.0, 1.0), Span(1, "1F0", "F", 0, 1.0, 2.0)), 2)


class FakePipeline:
    """A window is over after two checks."""

    plan: Plan | None = None
    table = ""
    num_ranks = data_parallel_size = 1

    def __init__(self, timeline: Timeline | None) -> None:
        self.recordings: list[int] = []
        self.gathered = self.checks = 0
        self.result = timeline

    def record(self, num_steps: int) -> None:
        self.recordings.append(num_steps)

    @property
    def has_recording(self) -> bool:
        self.checks += bool(self.recordings)
        return self.checks >= 2 and self.gathered == 0

    def timeline(self) -> Timeline | None:
        self.gathered += 1
        return self.result


def fit(lab: SimpleNamespace, pipeline: FakePipeline, *callbacks: Any, **options: Any) -> None:
    trainer = lab.trainer(callbacks=list(callbacks), **options)
    trainer.strategy.pipelined = pipeline
    trainer.fit(lab.module(), lab.loader(4))


def test_records_a_window_and_saves_it(lab: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pipeline = FakePipeline(MEASURED)
    fit(lab, pipeline, PipelineTimeline(start_step=2, num_steps=3, path=tmp_path / "run"))
    assert (pipeline.recordings, pipeline.gathered) == ([3], 1)
    saved = (tmp_path / "run" / "timeline.json").read_text(encoding="utf-8")
    assert Timeline.from_json(saved) == MEASURED
    assert (tmp_path / "run" / "timeline.png").stat().st_size > 1000


class Windows(FakePipeline):
    """Each window is over after one step, and tells its number."""

    has_recording = True  # type: ignore[assignment]

    def timeline(self) -> Timeline:
        number = len(self.recordings)
        return Timeline((Span(0, "0F0", "F", 0, 0.0, float(number)),), 1)


def test_several_windows_are_apart(lab: SimpleNamespace, tmp_path: Path) -> None:
    pipeline = Windows(None)
    windows = [PipelineTimeline(step, 1, tmp_path / str(step)) for step in (0, 2)]
    fit(lab, pipeline, *windows)
    assert pipeline.recordings == [1, 1]
    for number, step in enumerate((0, 2), start=1):
        saved = (tmp_path / str(step) / "timeline.json").read_text(encoding="utf-8")
        assert Timeline.from_json(saved).end == number


def test_logs_when_the_window_is_over(lab: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # However seldom the Trainer logs.
    logger = CSVLogger(tmp_path, name="", version="log")
    fit(lab, FakePipeline(MEASURED), PipelineTimeline(2), logger=logger, log_every_n_steps=100)
    with (tmp_path / "log" / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    # Recording began before step 2, and was over with the second check, after step 3.
    assert int(row.pop("step")) == 4
    assert {name: float(value) for name, value in row.items() if name != "epoch"} == {
        "timeline/bubble_ratio": 0.5,
        "timeline/step_ms": 2000.0,
        "timeline/rank0_idle_ms": 1000.0,
        "timeline/rank1_idle_ms": 1000.0,
        "timeline/stage0_forward_ms": 1000.0,
        "timeline/stage1_forward_ms": 1000.0,
    }
    assert (tmp_path / "log" / "timeline.json").exists()


def test_a_run_that_ends_within_the_window(lab: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pipeline = FakePipeline(MEASURED)
    pipeline.checks = -100
    fit(lab, pipeline, PipelineTimeline(7, path=tmp_path / "run"))
    assert (pipeline.recordings, pipeline.gathered) == ([3], 1)
    assert (tmp_path / "run" / "timeline.png").exists()


def test_without_matplotlib_the_data_is_saved(
    lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigurationError("drawing needs matplotlib")

    monkeypatch.setattr("lightning_tspipe.callbacks.timeline.plot_timelines", refuse)
    fit(lab, FakePipeline(MEASURED), PipelineTimeline(2, path=tmp_path / "run"))
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["timeline.json"]


def test_a_run_that_ends_before(lab: SimpleNamespace, tmp_path: Path) -> None:
    pipeline = FakePipeline(None)
    fit(lab, pipeline, PipelineTimeline(100, path=tmp_path / "run"))
    assert (pipeline.recordings, pipeline.gathered) == ([], 0)
    assert not (tmp_path / "run").exists()


def test_ordinary_strategies_have_nothing_to_draw(lab: SimpleNamespace, tmp_path: Path) -> None:
    trainer = lab.trainer(callbacks=[PipelineTimeline(0, path=tmp_path / "run")])
    trainer.fit(lab.module(), lab.loader(2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"start_step": -1}, {"num_steps": 0}])
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ConfigurationError, match=f"{name}={value} .*at least"):
        PipelineTimeline(**options)
