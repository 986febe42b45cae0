"""What callbacks measure and log, under real pipelines and with the loggers that people use."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from typing_extensions import override

from lightning_tspipe import DelayedTeacherUpdate, KNNEvaluator, PipelineThroughputMonitor
from tests.exactness.modules import images, labels
from tests.integration.comparing import both
from tests.integration.jobs import run
from tests.integration.trainings import (
    Session,
    Training,
)

BYOL = Training("Byol-group-2-by hand", "instance", {"num_microbatches": 2})
SIZES = ((4,) * 8, (4,) * 8)


class OfflineRun:
    """What W&B's logger does with a run, written to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, data: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


class OfflineLogger(Logger):
    """Shaped like WandbLogger: numbers and the step in one record of a lazily opened run."""

    def __init__(self) -> None:
        super().__init__()
        self._run: OfflineRun | None = None

    @property
    def name(self) -> str:
        return "offline"

    @property
    def version(self) -> str:
        return "0"

    @property
    @rank_zero_experiment
    def experiment(self) -> OfflineRun:
        if self._run is None:
            self._run = OfflineRun(Path("offline.jsonl"))
        return self._run

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.log({**metrics, "trainer/global_step": step})


def measured() -> list[Any]:
    bank = [(images(6, seed), labels(6, seed)) for seed in range(60, 63)]
    queries = [(images(4, seed), labels(4, seed)) for seed in range(70, 73)]
    return [
        DelayedTeacherUpdate(),
        PipelineThroughputMonitor(window=3, bubble_every_n_batches=50, peak_flops=1e9),
        KNNEvaluator(bank, queries, features="student", k=3),
        KNNEvaluator(bank, queries, features="teacher", k=3, name="teacher_knn"),
    ]


def train_and_log(training: Training) -> Any:
    loggers = [CSVLogger(".", name="", version="csv"), OfflineLogger()]
    loggers.append(TensorBoardLogger(".", name="", version="tensorboard"))
    return Session(training, **{"logger": loggers, **training.trainer}).fit().trained


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def test_every_logger_gets_accuracy_and_throughput(tmp_path: Path) -> None:
    training = replace(BYOL, callbacks=measured, sizes=SIZES)
    expected, ranks = both(train_and_log, training, tmp_path)
    for name in ("val_knn_top1", "val_knn_top5", "teacher_knn_top1", "teacher_knn_top5"):
        assert ranks[0].metrics[name] == pytest.approx(expected.metrics[name], rel=1e-9)
    rows = rows_of(tmp_path / "together" / "csv" / "metrics.csv")
    assert len(column(rows, "val_knn_top1")) == 2
    assert len(column(rows, "samples_per_second")) == 16 - 3
    assert all(0 < ratio < 1 for ratio in column(rows, "bubble_ratio"))
    assert all(0 < share < 1 for share in column(rows, "mfu"))
    # Late in every batch but an epoch's first.
    staleness = column(rows, "teacher_staleness")
    assert staleness == pytest.approx([1.0] * 5 + [2 / 3] * 3 + [1.0] * 5)
    elapsed = column(rows, "elapsed")
    assert elapsed == sorted(elapsed)
    assert len(elapsed) == 16
    for rank in (0, 1):
        assert column(rows, f"peak_memory/rank{rank}")[0] > 0
    assert column(rows, "data_wait_time")[-1] >= 0
    text = (tmp_path / "together" / "offline.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    logged = {name for record in records for name in record}
    assert {"val_knn_top1", "samples_per_second", "bubble_ratio", "trainer/global_step"} <= logged
    assert {name for row in rows for name in row if row[name]} - {"step"} <= logged
    assert list((tmp_path / "together" / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_accumulation_in_other_pipelines(num_ranks: int, tmp_path: Path) -> None:
    training = replace(
        BYOL, callbacks=measured, sizes=SIZES, num_ranks=num_ranks,
        trainer={"accumulate_grad_batches": 2},
    )  # fmt: skip
    run(train_and_log, training, num_ranks=num_ranks, folder=tmp_path)
    rows = rows_of(tmp_path / "csv" / "metrics.csv")
    # Of two batches, the first follows an update; numbers are logged with updates.
    assert column(rows, "teacher_staleness")[-2:] == pytest.approx([1 / 3, 1 / 3])
    assert f"peak_memory/rank{num_ranks - 1}" in rows[0]


def by_parts() -> list[Any]:
    bank = [(images(6, seed), labels(6, seed)) for seed in range(60, 63)]
    return [
        DelayedTeacherUpdate(),
        *(
            KNNEvaluator(bank, bank[:2], features=f"student.{part}", k=3, name=f"knn{part}")
            for part in range(3)
        ),
    ]


PARTS = {"student": [f"student.{part}" for part in range(3)]}


@pytest.mark.parametrize("options", [{}, pytest.param(PARTS, marks=pytest.mark.slow)], ids=str)
def test_features_from_within_a_network(options: dict[str, Any], tmp_path: Path) -> None:
    training = replace(BYOL, callbacks=by_parts, options=options, sizes=((4, 4),))
    expected, ranks = both(train_and_log, training, tmp_path)
    for part in range(3):
        name = f"knn{part}_top1"
        assert ranks[0].metrics[name] == pytest.approx(expected.metrics[name], rel=1e-9)
