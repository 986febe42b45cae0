from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_tspipe.callbacks import PipelineThroughputMonitor, PipelineTimeline
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
    assert summary["peak_memory"] > 0
    assert not summary.keys() & {"mfu", "teacher_staleness"}


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


class FakePipeline:
    """A pipeline of two ranks, in three replicas."""

    is_loss_rank = True
    data_parallel_size = 3
    bubble_ratio: float | None = 0.25
    batch_size = 4
    num_ranks = 2
    data_rank = 1
    teacher_ran_ahead: bool | None = True
    has_recording = False
    is_data_rank = True
    plan = None

    def __init__(self) -> None:
        self.seconds_reading = 7.0  # before the fit
        self.recorded: list[int] = []

    def gather(self, own: Any) -> list[Any] | None:
        other = (own[0] + 1, own[1] + 0.5) if isinstance(own, tuple) else 0
        return [own, other] if self.is_loss_rank else None

    def of_replicas(self, own: int) -> list[int]:
        return [own, own + 1, own + 2]

    def flops_per_sample(self) -> float:
        return 12.0

    def record(self, num_steps: int) -> None:
        self.recorded.append(num_steps)


class Lengths:
    """Tokens of a batch: 1 in the first, 2 in the second, and so on."""

    def __init__(self, first: int = 1) -> None:
        self.next = first

    def __call__(self, _: Any) -> int:
        self.next += 1
        return self.next - 1


def logged_tokens(trainer: Any) -> list[float]:
    with (Path(trainer.logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:
        return [float(row["tokens_per_second"]) for row in csv.DictReader(file) if row["step_time"]]


@pytest.mark.parametrize("has_pipeline", [False, True])
def test_tokens_of_windows(lab: SimpleNamespace, clock: Clock, *, has_pipeline: bool) -> None:
    """Behind the first batch, which takes 50 s, two windows of 3 batches of 2 s each."""
    monitor = PipelineThroughputMonitor(window=3, clock=clock, length_fn=Lengths())
    logger = CSVLogger(lab.trainer().default_root_dir)
    trainer = lab.trainer(callbacks=[monitor], max_epochs=1, logger=logger, log_every_n_steps=1)
    if has_pipeline:
        trainer.strategy.pipelined = FakePipeline()
    trainer.fit(timed(lab, clock), lab.loader(8), lab.loader(1))
    first, second = (2 + 3 + 4) / 6, (5 + 6 + 7) / 6
    replicas = 3 if has_pipeline else 1
    assert logged_tokens(trainer) == pytest.approx([
        *[first * replicas] * 3, *[second * replicas] * 2
    ])  # fmt: skip
    more = 1 + 2 if has_pipeline else 0  # in the other replicas
    assert monitor.summary()["num_tokens"] == sum(range(1, 9)) * replicas + more


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_tokens_go_on_from_a_checkpoint_within_a_window(
    lab: SimpleNamespace, clock: Clock, tmp_path: Path
) -> None:
    monitor = PipelineThroughputMonitor(window=4, clock=clock, length_fn=Lengths())
    saved = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = lab.trainer(callbacks=[monitor, saved], max_epochs=1, enable_checkpointing=True)
    trainer.fit(timed(lab, clock), lab.loader(7), lab.loader(1))
    again = PipelineThroughputMonitor(window=2, clock=clock, length_fn=Lengths(4))
    other = lab.trainer(callbacks=[again], max_epochs=1)
    path = tmp_path / "step=3.ckpt"
    other.fit(timed(lab, clock), lab.loader(7), lab.loader(1), ckpt_path=path)
    assert again.summary()["num_tokens"] == monitor.summary()["num_tokens"] == sum(range(1, 8))
    assert again.summary()["tokens_per_second"] == pytest.approx((5 + 6) / 4)


def test_a_function_of_the_batch_where_there_is_none(lab: SimpleNamespace) -> None:
    monitor = PipelineThroughputMonitor(batch_size_fn=len)
    trainer = lab.trainer(callbacks=[monitor], max_epochs=1)
    trainer.strategy.pipelined = FakePipeline()
    with pytest.raises(ConfigurationError, match=r"batch_size_fn: .* Leave it out"):
        trainer.fit(lab.module(), lab.loader(1))


def test_under_a_pipeline(lab: SimpleNamespace, clock: Clock) -> None:
    monitor = PipelineThroughputMonitor(window=2, clock=clock, peak_flops=5.0)
    trainer = lab.trainer(callbacks=[monitor], max_epochs=1)
    trainer.strategy.pipelined = pipelined = FakePipeline()
    trainer.fit(timed(lab, clock), lab.loader(6), lab.loader(1))
    summary = monitor.summary()
    assert summary["bubble_ratio"] == 0.25
    assert summary["samples_per_second"] == pytest.approx(3 * 4 / 2)
    assert trainer.logged_metrics["bubble_ratio"] == torch.tensor(0.25)
    # 6 samples/s of 12 FLOP on 2 * 3 devices of 5 FLOP/s.
    assert summary["mfu"] == pytest.approx(6 * 12 / (2 * 3 * 5))
    assert summary["teacher_staleness"] == 1.0
    assert summary["data_wait_time"] == pytest.approx(0.5)  # of the rank that reads
    assert summary["peak_memory"] == summary["peak_memory/rank1"] > summary["peak_memory/rank0"]
    assert pipelined.recorded == [4]


def test_staleness_counts_updates_under_accumulation(lab: SimpleNamespace) -> None:
    monitor = PipelineThroughputMonitor(window=4)
    trainer = lab.trainer(callbacks=[monitor], max_epochs=1, accumulate_grad_batches=2)
    trainer.strategy.pipelined = FakePipeline()
    trainer.fit(lab.module(), lab.loader(8))
    assert monitor.summary()["teacher_staleness"] == pytest.approx(0.5)


@pytest.mark.parametrize("options", [{}, {"bubble_every_n_batches": 3}])
def test_records_now_and_then(lab: SimpleNamespace, options: dict[str, Any]) -> None:
    trainer = lab.trainer(callbacks=[PipelineThroughputMonitor(2, **options)], max_epochs=1)
    trainer.strategy.pipelined = pipelined = FakePipeline()
    trainer.fit(lab.module(), lab.loader(10))
    assert len(pipelined.recorded) == (3 if options else 1)  # before batches 2, 5 and 8


@pytest.mark.parametrize("case", ["never", "timeline"])
def test_leaves_recording_to_others(lab: SimpleNamespace, case: str) -> None:
    monitor = PipelineThroughputMonitor(2, bubble_every_n_batches=None if case == "never" else 1)
    others = [PipelineTimeline(start_step=100)] if case == "timeline" else []
    trainer = lab.trainer(callbacks=[monitor, *others], max_epochs=1)
    trainer.strategy.pipelined = pipelined = FakePipeline()
    trainer.fit(lab.module(), lab.loader(6))
    assert pipelined.recorded == []


def test_totals_go_on_from_a_checkpoint(lab: SimpleNamespace, clock: Clock, tmp_path: Path) -> None:
    monitor = PipelineThroughputMonitor(window=2, clock=clock)
    first = lab.trainer(callbacks=[monitor], max_epochs=1)
    first.fit(timed(lab, clock), lab.loader(3), lab.loader(1))
    first.save_checkpoint(tmp_path / "last.ckpt")
    again = PipelineThroughputMonitor(window=2, clock=clock)
    trainer = lab.trainer(callbacks=[again], max_epochs=2)
    trainer.fit(timed(lab, clock), lab.loader(3), lab.loader(1), ckpt_path=tmp_path / "last.ckpt")
    assert again.summary()["num_batches"] == 6
    assert again.summary()["num_samples"] == 6 * 6
    assert again.summary()["elapsed"] == pytest.approx(2 * (50 + 2 + 2))
    assert again.summary()["step_time"] == pytest.approx(2)


def test_other_ranks_are_silent(lab: SimpleNamespace) -> None:
    monitor = PipelineThroughputMonitor(window=2)
    trainer = lab.trainer(callbacks=[monitor], max_epochs=1)
    trainer.strategy.pipelined = pipelined = FakePipeline()
    pipelined.is_loss_rank = False
    trainer.fit(lab.module(), lab.loader(4))
    assert monitor.summary() == {}
    assert "step_time" not in trainer.callback_metrics


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"bubble_every_n_batches": 0}, {"peak_flops": -1.0}]
)
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
        PipelineThroughputMonitor(**options)
