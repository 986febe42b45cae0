"""Students that read what their teachers give, under a Trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from tests.integration.comparing import both, labelled
from tests.integration.jobs import run_job
from tests.integration.trainings import CLOSE, Session, Trained, Training, delayed, train

FED = Training("FedByBoth", "instance", {"num_microbatches": 2}, trainer={"max_epochs": 2})


def validates(module: Any) -> None:
    """The validation reads the teacher too, otherwise than the training."""

    def step(batch: Any) -> None:
        x, y = batch
        guide = module.guide(x).tanh()
        made = module.student(torch.cat([x.flatten(1), guide - guide.amin(0)], 1))
        module.log("of_student", F.cross_entropy(made, y), batch_size=1)

    module.validation_step = step


def train_and_validate(training: Training) -> Trained:
    return Session(training, change=validates).fit(validation=labelled(50)).trained


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["tspipe", "gpipe"])
def test_training_and_validation(schedule: str, num_ranks: int, tmp_path: Path) -> None:
    training = replace(
        FED, options={**FED.options, "schedule": schedule},
        callbacks=delayed if schedule == "tspipe" else list,
    )  # fmt: skip
    expected, ranks = both(train_and_validate, training, tmp_path, num_ranks)
    assert len(set(map(float, expected.losses))) == 8
    torch.testing.assert_close(ranks[0].losses, expected.losses, **CLOSE)
    torch.testing.assert_close(ranks[0].weights, expected.weights, **CLOSE)
    assert ranks[0].metrics == pytest.approx(expected.metrics, rel=1e-9)
    assert "of_student" in expected.metrics


def by_hand(module: Any) -> None:
    """The same step, which optimizes by hand: ranks follow what the one with the loss does."""
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss, optimizer = step(batch, batch_idx), module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(loss)
        optimizer.step()
        return loss

    module.training_step, module.automatic_optimization = training_step, False


@pytest.mark.parametrize("schedule", ["tspipe", "gpipe"])
def test_by_hand(schedule: str, tmp_path: Path) -> None:
    """Before, a rank waited for the loss before it had made what the loss waits for."""
    training = replace(
        FED, options={**FED.options, "schedule": schedule}, change=by_hand,
        callbacks=delayed if schedule == "tspipe" else list,
    )  # fmt: skip
    expected, ranks = both(train, training, tmp_path)
    torch.testing.assert_close(ranks[0].losses, expected.losses, **CLOSE)
    torch.testing.assert_close(ranks[0].weights, expected.weights, **CLOSE)


def test_an_asynchronous_pipeline_is_refused(tmp_path: Path) -> None:
    training = replace(FED, options={"schedule": "1f1b"})
    for error in run_job(train, training, folder=tmp_path).errors:
        assert "several.py" in error
        assert "Use schedule='tspipe'" in error
