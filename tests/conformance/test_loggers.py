"""Loggers and profilers: those of other tools, and a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import rank_zero_only

from tests.integration.comparing import both, labelled
from tests.integration.trainings import (
    Session,
    Training,
    build_module,
)

CLASSIFIER = Training(
    "Classifier-group", "instance", {"num_microbatches": 1}, sizes=((5, 5, 3), (5, 5, 3))
)


class Own(Logger):
    """Notes what Lightning asks of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.metrics: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "own"

    @property
    def version(self) -> str:
        return "1"

    @property
    def save_dir(self) -> str:
        return "."

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step, metrics))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.calls.append(f"hyperparameters {dict(params)}")

    @rank_zero_only
    def log_graph(self, *_: Any, **__: Any) -> None:
        self.calls.append("graph")

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.calls.append(f"saved {Path(checkpoint_callback.best_model_path).name}")

    def save(self) -> None:
        self.calls.append("save")

    def finalize(self, status: str) -> None:
        self.calls.append(f"finalize {status}")


def fit_logging(training: Training) -> Any:
    module = build_module(training)
    module.save_hyperparameters({"width": 6})
    module.validation_step = lambda batch, batch_idx: module.log("val", module.net(batch[0]).mean())
    loggers, folders = [Own(), Own()], []
    for enabled in (True, False):
        it = Session(
            training, module=module, logger=loggers, enable_checkpointing=True,
            enable_autolog_hparams=enabled,
        )  # fmt: skip
        folders.append(it.fit(validation=labelled(50)).trainer.log_dir)
    return [(logger.calls, logger.metrics) for logger in loggers], folders


@pytest.mark.slow
def test_loggers_of_ones_own(tmp_path: Path) -> None:
    expected, results = both(fit_logging, CLASSIFIER, tmp_path)
    assert any(call.startswith("saved") for call in expected[0][0][0])
    for rank, (loggers, folders) in enumerate(results):
        assert folders == expected[1]
        for (calls, metrics), (their_calls, their_metrics) in zip(
            loggers, expected[0], strict=True
        ):
            if rank > 0:  # as under ddp
                assert metrics == []
                assert {call.split()[0] for call in calls} == {"save", "finalize"}
                continue
            assert calls == their_calls
            assert len(metrics) == len(their_metrics) > 8
            for (step, values), (their_step, theirs) in zip(metrics, their_metrics, strict=True):
                assert step == their_step
                assert values == pytest.approx(theirs, rel=1e-6)


def profile(training: Training) -> Any:
    simple = SimpleProfiler(dirpath=".", filename="simple")
    profilers: list[Profiler] = [
        simple,
        AdvancedProfiler(dirpath=".", filename="advanced"),
        PyTorchProfiler(dirpath=".", filename="torch", export_to_chrome=False, emit_nvtx=False),
    ]
    for profiler in profilers:
        ignored = ["The PyTorch Profiler default schedule"]
        Session(training, ignored=ignored, profiler=profiler).fit()
    return {name: len(times) for name, times in simple.recorded_durations.items()}


@pytest.mark.slow
def test_profilers(tmp_path: Path) -> None:
    expected, results = both(profile, CLASSIFIER, tmp_path)
    names = {name for name in expected if "Strategy" in name or "run_training" in name}
    assert len(names) > 3
    for found in results:
        for name in names:
            ours = name.replace("SingleDeviceStrategy", "TSPipeStrategy")
            assert found[ours] == expected[name], name
    files = sorted(path.name for path in (tmp_path / "together").glob("fit-*"))
    assert files == [f"fit-{kind}-{rank}.txt" for kind in ("advanced", "simple", "torch")
                     for rank in (0, 1)]  # fmt: skip
