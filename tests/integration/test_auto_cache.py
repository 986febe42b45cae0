"""Fine-tuning with layers that freeze: the same weights, whether activations are cached or not."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_tspipe import AutoCache
from lightning_tspipe.caching import WithIds, Worth
from lightning_tspipe.callbacks import auto_cache
from tests.integration import jobs
from tests.integration.trainings import CLOSE, quiet_trainer

NUM_SAMPLES = 24


class Pictures(Dataset[Any]):
    """Counts what is decoded."""

    def __init__(self, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.data = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator)
        self.noise = noise
        self.num_decoded = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.num_decoded += 1
        noise = self.noise * torch.randn(3, 8, 8) if self.noise else 0.0
        return self.data[index] + noise, index % 4


def network(dropout: float = 0.0) -> nn.Sequential:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        layer = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        return [layer, nn.BatchNorm2d(outputs), nn.Dropout(dropout), nn.ReLU()]

    return nn.Sequential(
        nn.Sequential(*block(3, 8)), nn.Sequential(*block(8, 8)), nn.Sequential(*block(8, 4)),
        nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip


class Classifier(LightningModule):
    """Freezes blocks at the start of epochs.

    Args:
        freeze: Frozen blocks from each of these epochs on.
        noise: Added to the inputs in the step.
        evaluates: Whether frozen blocks are put into eval mode.
    """

    def __init__(self, freeze: dict[int, int], noise: float = 0.0, evaluates: bool = True) -> None:
        super().__init__()
        self.freeze_at, self.noise, self.evaluates = freeze, noise, evaluates
        torch.manual_seed(0)
        self.student = network(dropout=0.0 if evaluates else 0.5)
        self.seen: list[Counter[int]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append(Counter())
        number = self.freeze_at.get(self.current_epoch, 0)
        for block in list(self.student.children())[:number]:
            block.requires_grad_(requires_grad=False)
            block.train(not self.evaluates)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        pictures, labels, ids = batch
        self.seen[-1].update(ids.tolist())
        pictures = pictures + self.noise * torch.randn_like(pictures)
        loss = nn.functional.cross_entropy(self.student(pictures), labels)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        pictures, labels = batch
        loss = nn.functional.cross_entropy(self.student(pictures), labels)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rate = trainer.callback_metrics.get("cache_hit_rate", torch.tensor(0.0))
        self.rates.append(round(float(rate), 6))


@dataclass(frozen=True)
class Run:
    cached: bool = True
    strategy: str = "auto"
    num_ranks: int = 1
    freeze: dict[int, int] = field(default_factory=lambda: {1: 1, 3: 2})
    options: dict[str, Any] = field(default_factory=dict)
    noise: tuple[float, float] = (0.0, 0.0)
    evaluates: bool = True
    num_epochs: int = 6
    with_ids: bool = True
    always: bool = True
    num_loaders: int = 1
    num_workers: int = 0


def train(run: Run) -> dict[str, Any]:
    pictures = Pictures(run.noise[0])
    dataset: Any = WithIds(pictures, inputs=0) if run.with_ids else pictures
    loader = DataLoader(
        dataset,
        5,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
        num_workers=run.num_workers,
    )
    module, rates = Classifier(run.freeze, run.noise[1], run.evaluates), Rates()
    caches = [AutoCache(always=run.always, **run.options)] if run.cached else []
    trainer = quiet_trainer(
        strategy=run.strategy, devices=run.num_ranks, max_epochs=run.num_epochs,
        callbacks=[*caches, rates],
    )  # fmt: skip
    loaders = loader if run.num_loaders == 1 else CombinedLoader([loader] * 2, "sequential")
    trainer.fit(module, loaders, DataLoader(Pictures(), 5))
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "loss": trainer.callback_metrics["loss"],
        "val_loss": trainer.callback_metrics["val_loss"],
        "rates": rates.rates,
        "seen": module.seen,
        "num_decoded": pictures.num_decoded,
        "is_on": caches[0].is_on if caches else None,
        "is_closed": not caches or caches[0].cache is None,
        "forward": "forward" in vars(module.student) or "training_step" in vars(module),
    }


def train_measured(reads_faster: bool) -> dict[str, Any]:
    """Reading is measured, and then takes no time, or longer than anything."""
    measured = vars(auto_cache)["measure"]

    def measure(*args: Any, **kwargs: Any) -> Worth:
        found: Worth = measured(*args, **kwargs)
        return replace(found, memory=0.0 if reads_faster else math.inf)

    vars(auto_cache)["measure"] = measure
    return train(Run(always=False))


def assert_same(found: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    for part in ("weights", "loss", "val_loss"):
        torch.testing.assert_close(found[part], expected[part], **(tolerance or CLOSE))


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: Any) -> dict[str, Any]:
    run = Run(cached=False)
    return jobs.run(train, run, num_ranks=1, folder=tmp_path_factory.mktemp("uncached"))[0]


@pytest.mark.distributed
def test_one_device_gives_the_weights_of_no_cache(uncached: Any, tmp_path: Path) -> None:
    found = jobs.run(train, Run(), num_ranks=1, folder=tmp_path)[0]
    assert_same(found, uncached)
    # Nothing is frozen in epoch 0. In epoch 1 all is computed, then read; in 3 it is pushed on.
    assert found["rates"] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert all(seen == Counter(range(NUM_SAMPLES)) for seen in found["seen"])
    # From the second batch of epoch 2 on, nothing is decoded.
    checked = 2 * 4 + 4
    assert found["num_decoded"] == checked + 2 * NUM_SAMPLES + 5
    assert uncached["num_decoded"] == 6 * NUM_SAMPLES
    assert found["is_on"]
    assert found["is_closed"]
    assert not found["forward"]


@pytest.mark.distributed
def test_processes_of_ddp_read_what_others_computed(tmp_path: Path) -> None:
    apart, together = tmp_path / "apart", tmp_path / "together"
    run = Run(strategy="ddp_find_unused_parameters_true", num_ranks=2)
    expected = jobs.run(train, replace(run, cached=False), num_ranks=2, folder=apart)
    found = jobs.run(train, run, num_ranks=2, folder=together)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert found[0]["rates"] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    for epochs in zip(*(rank["seen"] for rank in found), strict=True):
        assert sum(epochs, Counter()) == Counter(range(NUM_SAMPLES))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"memory": 64 * 100, "disk": 64 * 10000}, [1.0, 1.0, 1.0, 1.0]),
        # One sample finds no space, until what is behind the second block takes a quarter of it.
        ({"memory": 64 * 400}, [23 / 24, 23 / 24, 1.0, 1.0]),
        ({"memory": 0, "disk": "1MB"}, [1.0, 1.0, 1.0, 1.0]),
    ],
    ids=["a part on disk", "too little", "disk"],
)
def test_budgets_do_not_change_the_weights(
    uncached: Any, options: dict[str, Any], rates: list[float], tmp_path: Path
) -> None:
    options = options | {"folder": str(tmp_path)}
    found = jobs.run(train, Run(options=options), num_ranks=1, folder=tmp_path)[0]
    assert_same(found, uncached)
    assert {path.name for path in tmp_path.iterdir()} == {"output-0.txt"}
    assert found["rates"] == [0.0, 0.0, *[round(rate, 6) for rate in rates]]


@pytest.mark.exhaustive
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_workers_leave_out_inputs_too(tmp_path: Path) -> None:
    run = Run(num_workers=1, num_epochs=3)
    work = partial(jobs.run, train, num_ranks=1, folder=tmp_path, seconds=180)  # workers start late
    found = work(run)[0]
    expected = work(replace(run, cached=False))[0]
    assert_same(found, expected)
    assert found["rates"] == [0.0, 0.0, 1.0]


@pytest.mark.slow
@pytest.mark.distributed
def test_bfloat16_rounds_and_no_more(uncached: Any, tmp_path: Path) -> None:
    run = Run(options={"dtype": "bfloat16"})
    found = jobs.run(train, run, num_ranks=1, folder=tmp_path)[0]
    assert_same(found, uncached, rtol=0.1, atol=0.05)
    assert not torch.equal(found["loss"], uncached["loss"])


@pytest.mark.slow
@pytest.mark.distributed
def test_rounded_activations_are_the_same_whether_they_are_kept_or_not(
    uncached: Any, tmp_path: Path
) -> None:
    """Else a run that goes on, whose cache is empty, would train something else."""
    options = [{"dtype": "float32"}, {"dtype": "float32", "memory": 64 * 100}]
    runs = [Run(options=each, always=False) for each in options]
    whole, part = (jobs.run(train, run, num_ranks=1, folder=tmp_path)[0] for run in runs)
    assert whole["rates"] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert part["rates"] == [0.0, 0.0, 0.375, 0.375, 0.458333, 0.458333]
    assert_same(part, whole)
    with pytest.raises(AssertionError):
        assert_same(whole, uncached)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("reads_faster", [True, False])
def test_what_is_faster_is_measured(uncached: Any, reads_faster: bool, tmp_path: Path) -> None:
    found = jobs.run(train_measured, reads_faster, num_ranks=1, folder=tmp_path)[0]
    assert found["is_on"] is reads_faster
    assert found["rates"] == [0.0, 0.0, *[float(reads_faster)] * 4]
    assert_same(found, uncached)


@pytest.mark.distributed
def test_a_pipeline_wants_it_from_who_freezes(tmp_path: Path) -> None:
    job = jobs.run_job(train, Run(strategy="tspipe"), num_ranks=1, folder=tmp_path)
    assert "For other pipelines use FreezeAndRepack" in job.errors[0]


def fails(run: Run) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        train(run)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run(noise=(0.1, 0.0)), "random augmentation"),
        (Run(noise=(0.0, 0.1)), "different inputs for the same sample"),
        (Run(evaluates=False), "module.eval"),
        (Run(with_ids=False), "WithIds"),
        (Run(num_loaders=2), "several training loaders"),
        (Run(options={"network": "backbone"}), "backbone"),
        (Run(options={"dtype": "int8"}), "floating-point"),
        (Run(options={"memory": 2**60}), "the machine has"),
        (Run(options={"memory": 0}), "budget above 0"),
        (Run(options={"disk": "1MB", "folder": "/no/such"}), "No such file"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_errors_name_the_remedy(run: Run, message: str) -> None:
    assert message in fails(replace(run, freeze={0: 1}, num_epochs=2))
