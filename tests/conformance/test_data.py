"""Data modules and loaders: everything that they may have, in fits and evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.exactness.modules import images, labels
from tests.integration.comparing import both
from tests.integration.trainings import (
    CLOSE,
    RESUMING,
    Session,
    Training,
    trainer_of,
)

CLASSIFIER = Training("Classifier-group", "instance", {"num_microbatches": 1})


class Data(LightningDataModule):
    """Several loaders of each kind of evaluation, a state, hyperparameters."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[str] = []
        self.num_epochs = 0

    def _loader(self, size: int, seed: int, **arguments: Any) -> Any:
        data = TensorDataset(images(size, seed), labels(size, seed))
        return DataLoader(data, batch_size=self.hparams["batch_size"], **arguments)

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        self.num_epochs += 1
        generator = torch.Generator().manual_seed(self.num_epochs)
        weights = torch.arange(14.0) + 1
        sampler = WeightedRandomSampler(weights.tolist(), 14, generator=generator)
        return self._loader(14, 1, sampler=sampler)

    def val_dataloader(self) -> Any:
        self.calls.append("val")
        return {"first": self._loader(7, 2), "second": self._loader(5, 3)}

    def test_dataloader(self) -> Any:
        self.calls.append("test")
        return [self._loader(14, 4), self._loader(10, 5)]

    def predict_dataloader(self) -> Any:
        self.calls.append("predict")
        return [self._loader(14, 6), self._loader(10, 7)]

    def state_dict(self) -> dict[str, Any]:
        return {"num_epochs": self.num_epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append(f"load {state_dict}")

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(f"failed by {type(exception).__name__}")


def evaluate_loaders(module: Any) -> None:
    def step(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        module.log("loss", F.cross_entropy(module.net(batch[0]), batch[1]))

    module.validation_step = module.test_step = step
    module.predict_step = lambda batch, batch_idx, dataloader_idx=0: module.net(batch[0])


class Look(Callback):
    """Hooks may look at what is read, on every rank."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loader = trainer.train_dataloader
        self.seen += [len(loader), len(loader.dataset), loader.batch_size]
        self.seen += [len(each.dataset) for each in trainer.val_dataloaders]
        self.seen += [trainer.num_training_batches, trainer.num_val_batches]


class Leave(Callback):
    """All ranks leave the training in the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            trainer.strategy.barrier()  # else the first takes away what others still wait for
            raise ZeroDivisionError


def use_everything(training: Training) -> Any:
    saving, data = ModelCheckpoint(dirpath="saved"), Data()
    it = Session(
        training, saving, change=evaluate_loaders, ignored=[RESUMING, ".*ModelCheckpoint.*"],
        enable_checkpointing=True, max_epochs=2, num_sanity_val_steps=1, limit_test_batches=2,
        limit_predict_batches=0.5, limit_val_batches=2, reload_dataloaders_every_n_epochs=1,
        logger=CSVLogger(".", name="", version="log"),
    )  # fmt: skip
    trainer, trained = it.trainer, it.fit(datamodule=data).trained
    tested = trainer.test(it.module, datamodule=data, verbose=False)
    predicted = trainer.predict(it.module, datamodule=data)
    assert trainer.predict(it.module, datamodule=data, return_predictions=False) is None
    again = trainer_of(replace(training, trainer={"max_epochs": 4}), it.module, Leave())
    try:
        again.fit(it.module, datamodule=data, ckpt_path=saving.best_model_path, weights_only=False)
    except ZeroDivisionError:
        data.calls.append("left")
    return trained, tested, predicted, data.calls


@pytest.mark.slow
def test_everything_that_a_data_module_has(tmp_path: Path) -> None:
    expected, results = both(use_everything, CLASSIFIER, tmp_path)
    assert expected[3][-2:] == ["failed by ZeroDivisionError", "left"]
    assert "load {'num_epochs': 2}" in expected[3]
    assert [[len(batches) for batches in found] for found in expected[2]] == [[4, 4], [4]]
    torch.testing.assert_close(results[0][0].losses, expected[0].losses, **CLOSE)
    torch.testing.assert_close(results[0][0].weights, expected[0].weights, **CLOSE)
    for trained, tested, predicted, calls in results:
        assert trained.metrics == pytest.approx(expected[0].metrics, rel=1e-9)
        for ours, theirs in zip(tested, expected[1], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
        torch.testing.assert_close(predicted, expected[2], **CLOSE)
        assert calls == expected[3]
    hyperparameters = (tmp_path / "together/log/hparams.yaml").read_text()
    assert hyperparameters == (tmp_path / "alone/log/hparams.yaml").read_text()
    assert "batch_size: 4" in hyperparameters


def overfit(training: Training) -> Any:
    """Of shuffled loaders Lightning takes the first batches in order, for training and for both."""
    look = Look()
    shuffling = ".*You requested to overfit but enabled.*shuffling"
    it = Session(training, look, change=evaluate_loaders, ignored=[shuffling], overfit_batches=2)
    data = TensorDataset(images(12, 1), labels(12, 1))
    first, *others = (DataLoader(data, batch_size=4, shuffle=True) for _ in range(3))
    return it.fit(first, others).trained, look.seen


@pytest.mark.slow
def test_overfitting_takes_the_first_batches(tmp_path: Path) -> None:
    expected, results = both(overfit, CLASSIFIER, tmp_path)
    assert len(expected[0].losses) == 4
    torch.testing.assert_close(results[0][0].losses, expected[0].losses, **CLOSE)
    for trained, seen in results:
        assert trained.metrics == pytest.approx(expected[0].metrics, rel=1e-9)
        assert seen == expected[1]
