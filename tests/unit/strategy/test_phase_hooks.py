"""What a rank is said to have been doing is what it did, also between two batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_tspipe.runtime.faults.phases import HERE
from lightning_tspipe.strategy.shutdown.shutdown import phase_hooks


@pytest.fixture(autouse=True)
def phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "text", "the start-up")


def test_reading_the_first_batches_is_no_part_of_the_sanity_check() -> None:
    hooks = phase_hooks(SimpleNamespace(engine=None))
    trainer: Any = SimpleNamespace(global_step=0, current_epoch=0, sanity_checking=True)
    hooks["on_validation_batch_start"](trainer, None, None, 1)
    assert HERE.text == "batch 1 of the validation"
    hooks["on_validation_end"](trainer, None)
    hooks["on_sanity_check_end"](trainer, None)
    assert HERE.text == "the transition from the sanity check to training step 1"
    hooks["on_train_epoch_start"](trainer, None)
    assert HERE.text == "the beginning of epoch 0"
    hooks["on_train_batch_start"](trainer, None, None, 0)
    assert HERE.text == "training step 1, which captures and plans"


def test_behind_a_validation_in_mid_epoch_training_goes_on() -> None:
    hooks = phase_hooks(SimpleNamespace(engine="placed"))
    trainer: Any = SimpleNamespace(global_step=4, current_epoch=1, sanity_checking=False)
    hooks["on_validation_batch_start"](trainer, None, None, 2)
    hooks["on_validation_end"](trainer, None)
    assert HERE.text == "the transition from the validation to training step 5"
    hooks["on_train_batch_start"](trainer, None, None, 0)
    assert HERE.text == "training step 5"
    hooks["on_train_epoch_end"](trainer, None)
    assert HERE.text == "the end of epoch 1"
