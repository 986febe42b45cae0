"""Heads whose features are kept: the same weights, and the trunk is not asked again."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_tspipe import AutoCache, TSPipeStrategy
from lightning_tspipe.caching import WithIds, Worth
from lightning_tspipe.callbacks import cached_pipelines
from tests.exactness.fanout import NUM_CLASSES, WIDTH, Tasks
from tests.integration import jobs
from tests.integration.trainings import CLOSE, quiet_trainer

NUM_SAMPLES = 23
NUM_KEPT = 12


class Samples(Dataset[Any]):
    """Counts what is loaded."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        columns = [torch.randint(n, (NUM_SAMPLES,), generator=generator) for n in NUM_CLASSES]
        self.labels = torch.stack(columns, 1)
        self.num_loaded = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_loaded += 1
        return self.x[index], self.labels[index]


@dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        num_ranks: Of the pipeline; 0: an ordinary device.
        cached: Whether features are kept.
        cache: Arguments of ``AutoCache``.
        options: Of the strategy.
        change: What goes wrong.
        reads_faster: Whether reading features shall seem faster than computing them; None: as it is
            measured.
    """

    num_ranks: int = 2
    cached: bool = True
    cache: dict[str, Any] = field(default_factory=lambda: {"always": True})
    options: dict[str, Any] = field(default_factory=dict)
    change: str = ""
    reads_faster: bool | None = None


class Changing(Tasks):
    """Does what a cache can't bear."""

    change = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels, *_ = batch
        if self.change == "noise":
            x = x + torch.randn_like(x)
        if self.change == "twice":
            self.teacher(x)
        return super().training_step((x, labels), batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.change == "weights" and self.current_epoch == 1:
            for parameter in self.teacher.parameters():
                if not parameter.is_meta:
                    parameter.data.mul_(1.1)


class Watch(Callback):
    """Notes the rate of hits of each epoch."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        rate = trainer.callback_metrics.get("cache_hit_rate", torch.tensor(-1.0))
        self.rates.append(round(float(rate), 6))


def pretend(reads_faster: bool) -> None:
    """Reading is measured, and then takes no time, or longer than anything."""
    measured = vars(cached_pipelines)["measure_reading"]

    def measure(*args: Any, **kwargs: Any) -> Worth:
        found: Worth = measured(*args, **kwargs)
        return replace(found, memory=0.0 if reads_faster else math.inf)

    vars(cached_pipelines)["measure_reading"] = measure


def train(run: Run) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    if run.reads_faster is not None:
        pretend(run.reads_faster)
    samples, module, watch = Samples(), Changing(3), Watch()
    module.change = run.change
    if run.change == "train":
        module.teacher.train()
    cache = AutoCache(**{"memory": "1MB", **run.cache})
    trainer = quiet_trainer(
        strategy=TSPipeStrategy(**run.options) if run.num_ranks else "auto",
        devices=max(1, run.num_ranks), max_epochs=4, precision="64-true",
        callbacks=[cache, watch] if run.cached else [watch],
    )  # fmt: skip
    dataset = WithIds(samples, inputs=0)
    loader = DataLoader(dataset, 5, shuffle=True, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, loader)
    weights = {} if trainer.global_rank else dict(module.student.state_dict())
    return {
        "weights": {name: value.clone() for name, value in weights.items()},
        "rates": watch.rates,
        "num_loaded": samples.num_loaded,
        "is_on": cache.is_on,
        "is_closed": cache.cache is None,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal weights, but for a bias before BatchNorm: its gradient is nothing but rounding.

    The means of what comes out move along with it.
    """
    weights = [dict(each["weights"]) for each in (found, expected)]
    for each in weights:
        del each["heads.task1.0.bias"], each["heads.task1.1.running_mean"]
    torch.testing.assert_close(*weights, **CLOSE)


def job(run: Run, folder: Path) -> list[dict[str, Any]]:
    return jobs.run(train, run, num_ranks=max(1, run.num_ranks), folder=folder)


@pytest.mark.distributed
def test_features_are_computed_once(tmp_path: Path) -> None:
    expected = job(Run(num_ranks=0, cached=False), tmp_path / "plain")[0]
    found = job(Run(options={"partition": [4, 6]}), tmp_path / "piped")
    assert_same(found[0], expected)
    for rank in found:
        assert rank["rates"] == [0.0, 1.0, 1.0, 1.0]
        assert rank["is_on"]
        assert rank["is_closed"]
    # Two epochs, and what was checked before; less than the three whole ones without a cache
    assert found[1]["num_loaded"] < 3 * NUM_SAMPLES
    assert expected["num_loaded"] == 4 * NUM_SAMPLES


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("run", "rate"),
    [
        (Run(0), 1.0),
        (Run(1), 1.0),
        (Run(3, options={"partition": [4, 3, 3], "queue_depth": 5}), 1.0),
        (Run(4, options={"num_microbatches": 3}), 1.0),
        (Run(2, options={"schedule": "gpipe"}), 1.0),
        # Space for some of the samples only
        (Run(2, cache={"always": True, "memory": 64 * 12}), NUM_KEPT / NUM_SAMPLES),
        (Run(0, cache={"always": True, "memory": 64 * 12}), NUM_KEPT / NUM_SAMPLES),
        # What is faster is measured.
        (Run(2, cache={}, reads_faster=True), 1.0),
    ],
    ids=str,
)
def test_weights_are_those_of_no_cache(tmp_path: Path, run: Run, rate: float) -> None:
    expected = job(Run(num_ranks=0, cached=False), tmp_path / "plain")[0]
    found = job(run, tmp_path / "kept")
    assert_same(found[0], expected)
    for rank in found:
        assert rank["is_on"]
        assert rank["rates"] == [0.0, *[round(rate, 6)] * 3]


@pytest.mark.slow
@pytest.mark.distributed
def test_nothing_is_kept_where_computing_is_faster(tmp_path: Path) -> None:
    expected = job(Run(num_ranks=0, cached=False), tmp_path / "plain")[0]
    found = job(Run(2, cache={}, reads_faster=False), tmp_path / "measured")
    assert_same(found[0], expected)
    for rank in found:
        assert rank["is_on"] is False
        assert rank["rates"] == [-1.0] * 4  # none is logged


@pytest.mark.slow
@pytest.mark.distributed
def test_a_trunk_with_other_weights_runs_again(tmp_path: Path) -> None:
    expected = job(Run(num_ranks=0, cached=False, change="weights"), tmp_path / "plain")[0]
    found = job(Run(change="weights"), tmp_path / "kept")
    assert_same(found[0], expected)
    assert found[0]["rates"] == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("noise", "get different inputs for the same sample"),
        ("twice", "calls the trunk 2 times"),
        ("train", "is in train mode"),
    ],
)
def test_what_can_not_be_kept_is_said_on_every_rank(
    tmp_path: Path, change: str, message: str
) -> None:
    found = jobs.run_job(train, Run(change=change), num_ranks=2, folder=tmp_path, seconds=60)
    assert all(rank.exit_code for rank in found.ranks)
    assert message in found.output, found.output[-3000:]


def test_other_networks_of_heads_are_not_kept(tmp_path: Path) -> None:
    run = replace(Run(1), cache={"network": "student"})
    found = jobs.run_job(train, run, num_ranks=1, folder=tmp_path)
    assert "only on the trunk of a StudentFanout" in found.errors[0]
