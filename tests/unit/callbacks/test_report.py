from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_tspipe.callbacks import PipelineThroughputMonitor, PipelineTimeline, RunReport
from lightning_tspipe.callbacks.metric_history import MetricHistory
from tests.unit.callbacks.test_timeline import MEASURED, FakePipeline


class Recorded(FakePipeline):
    """A pipeline whose only rank is this one."""

    seconds_reading, data_rank, batch_size = 0.0, 0, 6
    bubble_ratio = teacher_ran_ahead = None
    is_data_rank = is_loss_rank = True
    table = "rank 0  the stages"

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def flops_per_sample(self) -> float:
        return 0.0


def fit(lab: SimpleNamespace, *callbacks: Any, num_batches: int = 8, **options: Any) -> Any:
    trainer = lab.trainer(callbacks=list(callbacks), log_every_n_steps=1, **options)
    trainer.strategy.pipelined = Recorded(MEASURED)
    trainer.fit(lab.module(), lab.loader(num_batches))
    return trainer


def test_one_line_gives_a_report_of_everything(lab: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    logger = CSVLogger(tmp_path, name="", version="log")
    report = RunReport()
    trainer = fit(lab, report, logger=logger, num_batches=15)
    assert report.file == tmp_path / "log" / "report.html"
    page = report.file.read_text(encoding="utf-8")
    for text in ("Pair", "finished", "the stages", "samples per second", "peak memory of a rank"):
        assert text in page
    assert ">measured<" not in page
    assert '"name":"measured"' in page  # the timeline's data
    assert "None was logged. KNNEvaluator" in page
    # What it needs was added once, and its own logger is gone.
    kinds = [type(each).__name__ for each in trainer.callbacks]
    assert kinds.count("PipelineTimeline") == kinds.count("PipelineThroughputMonitor") == 1
    assert trainer.loggers == [logger]


def test_callbacks_of_the_user_stay_the_only_ones(lab: SimpleNamespace, tmp_path: Path) -> None:
    mine = PipelineThroughputMonitor(window=2), PipelineTimeline(1, path=tmp_path / "there")
    trainer = fit(lab, RunReport(tmp_path / "here"), *mine)
    own = [each for each in trainer.callbacks if type(each) in {type(one) for one in mine}]
    assert own == list(mine)
    assert (tmp_path / "here" / "report.html").exists()
    assert [file.name for file in (tmp_path / "here").iterdir()] == ["report.html"]


@pytest.mark.parametrize("error", [ValueError("broken <here>"), KeyboardInterrupt()])
def test_a_run_that_fails_has_a_report(
    lab: SimpleNamespace, tmp_path: Path, error: BaseException
) -> None:
    module = lab.module()

    def fail(*_: Any) -> None:
        if module.global_step == 3:
            raise error

    module.after_student = fail
    trainer = lab.trainer(callbacks=[RunReport(tmp_path / "run")], logger=False)
    with pytest.raises((ValueError, SystemExit, KeyboardInterrupt)):
        trainer.fit(module, lab.loader(4))
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "3 steps" in page
    if isinstance(error, ValueError):
        assert "failed: ValueError: broken &lt;here&gt;" in page
        assert "Traceback" in page
    else:
        assert ">stopped: KeyboardInterrupt<" in page
    assert trainer.loggers == []
    # One device has no pipeline, and this run was over before anything was measured.
    assert "SingleDeviceStrategy has no pipeline." in page
    assert "Training ended before the monitor&#x27;s 20 batches were over." in page


def test_curves_go_on_where_a_checkpoint_ended(lab: SimpleNamespace, tmp_path: Path) -> None:
    first = lab.trainer(callbacks=[RunReport()], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    first.fit(lab.module(), lab.loader(4))
    first.save_checkpoint(tmp_path / "it.ckpt")
    points: dict[str, Any] = {}

    class Look(PipelineTimeline):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            (history,) = [each for each in trainer.loggers if isinstance(each, MetricHistory)]
            points.update(history.points)

    second = lab.trainer(callbacks=[RunReport(), Look()], max_epochs=3, log_every_n_steps=1)
    second.fit(lab.module(), lab.loader(4), ckpt_path=tmp_path / "it.ckpt", weights_only=False)
    assert [step for step, _ in points["elapsed"]] == list(range(12))
    seconds = [value for _, value in points["elapsed"]]
    assert seconds == sorted(seconds)


def test_a_report_that_cannot_be_written_ends_no_training(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("a file where the folder would be")
    trainer = lab.trainer(callbacks=[RunReport(tmp_path / "run")])
    with pytest.warns(UserWarning, match="no report is written"):
        trainer.fit(lab.module(), lab.loader(2))
    assert trainer.global_step == 4


def test_long_runs_have_few_points() -> None:
    history = MetricHistory(".")
    for step in range(20_000):
        history.log_metrics({"loss": 1.0, "picture": "none"}, step)
    points = history.points["loss"]
    assert 500 < len(points) <= 2000
    assert (points[0][0], points[-1][0]) == (0, 19_999)
    assert list(history.points) == ["loss"]
