from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_tspipe.callbacks import PipelineThroughputMonitor
from lightning_tspipe.errors import ConfigurationError


class Clock:
    """Time that passes only when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def timed(lab: SimpleNamespace, clock: Clock) -> Any:
    """A module whose steps take 2 s (the first one 50 s), whose validation takes 1000 s."""
    durations = (50.0 if index == 0 else 2.0 for index in count())

    class Timed(lab.module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Tensor) -> Tensor:
            clock.now += next(durations)
            loss: Tensor = super().training_step(batch)
            return loss

        def validation_step(self, batch: Tensor) -> None:
            clock.now += 1000 + 0 * len(batch)

    return Timed()


def test_rates_over_a_window(lab: SimpleNamespace, clock: Clock) -> None:
    class Waiting(lab.loader):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[Tensor]:
            for batch in super().__iter__():
                clock.now += 1
                yield batch

    monitor = PipelineThroughputMonitor(window=3, clock=clock)
    trainer = lab.trainer(callbacks=[monitor], max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(timed(lab, clock), Waiting(4), lab.loader(1))
    summary = monitor.summary()
    assert summary["num_batches"] == 12
    assert summary["num_samples"] == 12 * 6
    assert summary["step_time"] == pytest.approx(3)
    assert summary["data_wait_time"] == pytest.approx(1)
    assert summary["samples_per_second"] == pytest.approx(6 / 3)
    assert summary["elapsed"] == pytest.approx(50 + 11 * 2 + 12 * 1)
    assert "bubble_ratio" not in summary
    assert "peak_memory" not in summary


def test_logs_when_the_window_is_full(lab: SimpleNamespace, clock: Clock) -> None:
    logger = CSVLogger(lab.trainer().default_root_dir)
    monitor = PipelineThroughputMonitor(
        window=2, batch_size_fn=lambda batch: 2 * len(batch), clock=clock
    )
    trainer = lab.trainer(
        callbacks=[monitor],
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(timed(lab, clock), lab.loader(5), lab.loader(1))
    with (Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["step_time"]]
    assert [row["step"] for row in rows] == ["2", "3", "4"]
    assert {float(row["step_time"]) for row in rows} == {2.0}
    assert {float(row["samples_per_second"]) for row in rows} == {6.0}
    assert {float(row["data_wait_time"]) for row in rows} == {0.0}


def test_under_a_pipeline(lab: SimpleNamespace, clock: Clock) -> None:
    monitor = PipelineThroughputMonitor(window=2, clock=clock)
    trainer = lab.trainer(callbacks=[monitor], max_epochs=1)
    trainer.strategy.pipelined = SimpleNamespace(
        is_loss_rank=True, data_parallel_size=3, bubble_ratio=0.25, batch_size=4
    )
    trainer.fit(timed(lab, clock), lab.loader(4), lab.loader(1))
    summary = monitor.summary()
    assert summary["bubble_ratio"] == 0.25
    assert summary["samples_per_second"] == pytest.approx(3 * 4 / 2)
    assert trainer.logged_metrics["bubble_ratio"] == torch.tensor(0.25)


def test_other_ranks_are_silent(lab: SimpleNamespace) -> None:
    monitor = PipelineThroughputMonitor(window=2)
    trainer = lab.trainer(callbacks=[monitor], max_epochs=1)
    trainer.strategy.pipelined = SimpleNamespace(is_loss_rank=False)
    trainer.fit(lab.module(), lab.loader(4))
    assert monitor.summary() == {}
    assert "step_time" not in trainer.callback_metrics


def test_a_window_of_one() -> None:
    with pytest.raises(ConfigurationError, match="window=1"):
        PipelineThroughputMonitor(window=1)
