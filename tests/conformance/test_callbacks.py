"""Lightning's own callbacks: what they do is what they do on one device, or they are refused."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks as known
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ProgressBar,
    RichModelSummary,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from tests.integration.comparing import both, labelled
from tests.integration.jobs import run_job
from tests.integration.trainings import (
    CLOSE,
    Session,
    Training,
)

CLASSIFIER = Training(
    "Classifier-group", "instance", {"num_microbatches": 1}, sizes=((5, 5, 3, 4), (5, 5, 3, 4))
)


class Bar(ProgressBar):
    """A user's own: it notes what there is to show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def disable(self) -> None:
        """It shows nothing in any case."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        shown = self.get_metrics(trainer, pl_module)
        self.shown.append((self.total_train_batches, sorted(shown)))


def fit_watched(training: Training) -> Any:
    bar, noted = Bar(), []
    by_lambda = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: noted.append(("train", trainer.global_step)),
        on_validation_end=lambda trainer, *_: noted.append(("val", trainer.global_step)),
    )
    it = Session(
        training, bar, by_lambda, RichModelSummary(), DeviceStatsMonitor(cpu_stats=True),
        LearningRateMonitor(), logger=CSVLogger(".", name="", version="log"), log_every_n_steps=2,
        enable_progress_bar=True, enable_model_summary=True,
    )  # fmt: skip
    it.module.validation_step = lambda batch, batch_idx: it.module.log(
        "val", it.module.net(batch[0]).sum()
    )
    it.trainer.accelerator.get_device_stats = lambda _device: {"memory": 7.0}
    return it.fit(validation=labelled(50)).trained, bar.shown, noted


@pytest.mark.slow
def test_callbacks_that_watch(tmp_path: Path) -> None:
    expected, results = both(fit_watched, CLASSIFIER, tmp_path)
    torch.testing.assert_close(results[0][0].weights, expected[0].weights, **CLOSE)
    assert results[0][1] == expected[1]
    assert [noted for _, _, noted in results] == [expected[2], expected[2]]
    rows = []
    for name in ("alone", "together"):
        with (tmp_path / name / "log/metrics.csv").open() as file:
            rows.append([{k: v for k, v in row.items() if v} for row in csv.DictReader(file)])
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]
    names = {name for row in rows[0] for name in row}
    assert {name.split(".")[0] for name in names} >= {"DeviceStatsMonitor", "lr-SGD", "val"}
    outputs = [(tmp_path / f"together/output-{rank}.txt").read_text() for rank in (0, 1)]
    assert ["Total params" in output for output in outputs] == [True, False]


def finds_rate() -> list[Any]:
    return [LearningRateFinder(1e-4, 1.0, num_training_steps=14)]


def fit_with_found_rate(training: Training) -> Any:
    it = Session(training)
    module = it.module
    module.lr = 1e-3
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=module.lr)
    return it.fit().trained, module.lr


@pytest.mark.slow
def test_the_learning_rate_finder(tmp_path: Path) -> None:
    training = replace(CLASSIFIER, callbacks=finds_rate, sizes=((4,) * 6,) * 3)
    expected, results = both(fit_with_found_rate, training, tmp_path)
    assert expected[1] != 1e-3
    for trained, rate in results:
        assert rate == expected[1]
        assert trained.global_step == expected[0].global_step
    torch.testing.assert_close(results[0][0].losses, expected[0].losses, **CLOSE)
    torch.testing.assert_close(results[0][0].weights, expected[0].weights, **CLOSE)


def detects() -> list[Any]:
    return [importlib.import_module("lightning.pytorch.callbacks.spike").SpikeDetection()]


def spike(module: Any) -> None:
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = step(batch, batch_idx)
        return loss * (100.0 if module.global_step == 6 else 1.0)

    module.training_step = training_step


def fit_until_the_spike(training: Training) -> tuple[str, int]:
    it = Session(training)
    try:
        it.fit()
    except RuntimeError as error:
        return type(error).__name__, it.trainer.global_step
    return "", it.trainer.global_step


@pytest.mark.slow
def test_spikes_are_detected_by_all_ranks(tmp_path: Path) -> None:
    training = replace(CLASSIFIER, callbacks=detects, change=spike)
    expected, results = both(fit_until_the_spike, training, tmp_path)
    assert expected == ("TrainingSpikeException", 7)
    assert results == [expected, expected]
    found = [json.loads((tmp_path / name / "skip_batches.json").read_text())
             for name in ("alone", "together")]  # fmt: skip
    assert found[0] == found[1] == [1, 2]


class Callbacks:
    """Makes one of Lightning's callbacks in each process."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._name, self._args, self._kwargs = name, args, kwargs

    def __call__(self) -> list[Any]:
        return [getattr(known, self._name)(*self._args, **self._kwargs)]


def first_size(batch: Any) -> int:
    return len(batch[0])


REFUSED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "StochasticWeightAveraging": (
        Callbacks("StochasticWeightAveraging", 0.1),
        "Use WeightAveraging",
    ),
    "BackboneFinetuning": (Callbacks("BackboneFinetuning"), "add_param_group"),
    "ModelPruning": (
        Callbacks("ModelPruning", nn.utils.prune.L1Unstructured, amount=0.5),
        "Prune before or after fit",
    ),
    "ThroughputMonitor": (
        Callbacks("ThroughputMonitor", first_size),
        "Use lightning_tspipe.PipelineThroughputMonitor",
    ),
    "BatchSizeFinder": (Callbacks("BatchSizeFinder"), "find the size with strategy='auto'"),
}


def fit(training: Training) -> None:
    """With all that these callbacks ask for."""
    it = Session(training, logger=CSVLogger(".", name="", version="log"))
    it.module.backbone, it.module.batch_size = nn.Linear(2, 2), 4
    it.module.train_dataloader = lambda: it.loader
    it.trainer.fit(it.module)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    callbacks, words = REFUSED[name]
    job = run_job(fit, replace(CLASSIFIER, callbacks=callbacks), folder=tmp_path, seconds=60)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert any(
        error.startswith(f"ConfigurationError: {name}") and words in error for error in job.errors
    ), job.output
