from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_tspipe.callbacks import PipelineTimeline
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.simulation.timeline import Span, Timeline


class FakePipeline:
    def __init__(self, timeline: Timeline | None) -> None:
        self.recordings: list[int] = []
        self.result = timeline

    def record(self, num_steps: int) -> None:
        self.recordings.append(num_steps)

    def timeline(self) -> Timeline | None:
        return self.result


def test_records_a_window_and_saves_it(lab: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = Timeline((Span(0, "0F0", "F", 0, 0.0, 1.0), Span(1, "1F0", "F", 0, 1.0, 2.0)), 2)
    pipeline = FakePipeline(measured)
    callback = PipelineTimeline(start_step=2, num_steps=3, path=tmp_path / "run")
    trainer = lab.trainer(callbacks=[callback])
    trainer.strategy.pipelined = pipeline
    trainer.fit(lab.module(), lab.loader(4))
    assert pipeline.recordings == [3]
    saved = (tmp_path / "run" / "timeline.json").read_text(encoding="utf-8")
    assert Timeline.from_json(saved) == measured
    assert (tmp_path / "run" / "timeline.png").stat().st_size > 1000


def test_a_run_that_ends_before(lab: SimpleNamespace, tmp_path: Path) -> None:
    pipeline = FakePipeline(None)
    trainer = lab.trainer(callbacks=[PipelineTimeline(100, path=tmp_path / "run")])
    trainer.strategy.pipelined = pipeline
    trainer.fit(lab.module(), lab.loader(2))
    assert pipeline.recordings == []
    assert not (tmp_path / "run").exists()


def test_ordinary_strategies_have_nothing_to_draw(lab: SimpleNamespace, tmp_path: Path) -> None:
    trainer = lab.trainer(callbacks=[PipelineTimeline(0, path=tmp_path / "run")])
    trainer.fit(lab.module(), lab.loader(2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"start_step": -1}, {"num_steps": 0}])
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PipelineTimeline(**options)
