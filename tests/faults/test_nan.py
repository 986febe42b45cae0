"""A loss that is not a number: what Lightning does on one device, and no hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping

from tests.exactness.modules import make_epochs
from tests.integration.comparing import both
from tests.integration.jobs import run_job
from tests.integration.trainings import Epochs, Training, build_module, train, trainer_of


def spoil_the_third_loss(module: Any) -> None:
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 else loss

    module.training_step = training_step


TRAINING = Training(
    "Classifier-group", "instance", {"num_microbatches": 2}, change=spoil_the_third_loss
)


def test_training_goes_on(tmp_path: Path) -> None:
    expected, found = both(train, TRAINING, tmp_path)
    assert [rank.global_step for rank in found] == [8, 8]
    close = {"rtol": 1e-9, "atol": 1e-12, "equal_nan": True}
    torch.testing.assert_close(found[0].losses, expected.losses, **close)
    assert bool(torch.stack(expected.losses).isnan().any())
    torch.testing.assert_close(found[0].weights, expected.weights, **close)


def stops_early() -> list[Any]:
    return [EarlyStopping("train_loss", check_finite=True, check_on_train_epoch_end=True)]


def test_early_stopping_ends_all_ranks(tmp_path: Path) -> None:
    training = replace(TRAINING, callbacks=stops_early, sizes=((5, 5, 5),) * 3)
    expected, found = both(train, training, tmp_path)
    assert expected.global_step == 6  # logged is the loss before it is spoilt, so one epoch later
    assert [rank.global_step for rank in found] == [6, 6]


def test_anomalies_are_told_once(tmp_path: Path) -> None:
    training = replace(TRAINING, trainer={"detect_anomaly": True})
    job = run_job(fit_loosely, training, folder=tmp_path)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert job.output.count("Traceback (most recent call last)") == 1, job.output
    assert "Function 'MulBackward0' returned nan values" in job.ranks[0].error
    assert "stops too" in job.ranks[1].output


def fit_loosely(training: Training) -> None:
    """Warnings are no errors here: torch warns of an anomaly before it fails."""
    module = build_module(training)
    epochs = Epochs(make_epochs(module, training.sizes))
    trainer_of(training, module).fit(module, epochs)
