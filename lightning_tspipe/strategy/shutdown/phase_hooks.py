"""Hooks that note what this rank is doing, for messages about failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_tspipe.runtime.faults.phases import HERE, SAVING
from lightning_tspipe.strategy.lightning.run import Run


def phase_hooks(run: Run) -> dict[str, Callable[..., None]]:
    """Hooks of a callback that comes before all others."""

    def train_batch(trainer: Any, *_: Any) -> None:
        step = trainer.global_step + 1
        plans = run.engine is None
        HERE.enter(f"training step {step}{', which captures and plans' if plans else ''}")

    def goes_on(after: str) -> Callable[..., None]:
        def behind(trainer: Any, *_: Any) -> None:
            HERE.enter(f"the way from {after} to training step {trainer.global_step + 1}")

        return behind

    def evaluates(what: str) -> Callable[..., None]:
        def batch(_trainer: Any, _module: Any, _batch: Any, index: int, *_: Any) -> None:
            HERE.enter(f"batch {index} of the {what}")

        return batch

    return {
        "on_sanity_check_end": goes_on("the sanity check"),
        "on_train_epoch_start": lambda trainer, *_: HERE.enter(
            f"the beginning of epoch {trainer.current_epoch}"
        ),
        "on_train_batch_start": train_batch,
        "on_validation_batch_start": evaluates("validation"),
        "on_validation_end": lambda trainer, *_: (
            None if trainer.sanity_checking else goes_on("the validation")(trainer)
        ),
        "on_test_batch_start": evaluates("test"),
        "on_predict_batch_start": evaluates("prediction"),
        "on_save_checkpoint": lambda *_: HERE.interrupt(SAVING),
        "on_train_epoch_end": lambda trainer, *_: HERE.enter(
            f"the end of epoch {trainer.current_epoch}"
        ),
        "on_train_end": lambda *_: HERE.enter("the end of the training"),
    }
