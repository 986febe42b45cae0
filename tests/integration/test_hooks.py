"""Every hook of a module runs on every rank, in the order of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.core import hooks
from torch import Tensor

from tests.exactness.modules import make_epochs
from tests.integration.comparing import alone, both, labelled
from tests.integration.jobs import run
from tests.integration.trainings import (
    CLOSE,
    RESUMING,
    Session,
    Trained,
    Training,
    delayed,
)

BYOL = Training(
    "Byol-group-2-by hand", "instance", {"num_microbatches": 1}, callbacks=delayed,
    sizes=((4, 4, 3), (4, 4, 3)),
)  # fmt: skip

NOT_HERE = {
    # They run on the rank that has the batches, and have a test of their own.
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "configure_sharded_model",  # the old name of configure_model; Lightning refuses both together
}  # fmt: skip
HOOKS = {
    name for kind in (hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks)
    for name in vars(kind) if not name.startswith("_")
} - NOT_HERE | {
    "configure_callbacks", "configure_optimizers", "configure_gradient_clipping", "optimizer_step",
    "optimizer_zero_grad", "lr_scheduler_step",
}  # fmt: skip


def note_hooks(module: Any, calls: list[str]) -> None:
    """Have the module's hooks add their names to a list, and do what they do."""
    known = type(module)

    def noting(name: str, own: Callable[..., Any] | None) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(*args, **kwargs) if own else getattr(known, name)(self, *args, **kwargs)

        return hook

    named = {name: noting(name, vars(module).pop(name, None)) for name in HOOKS}
    module.__class__ = type(known.__name__, (known,), named)


def configure(module: Any) -> None:
    def optimizers() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    module.configure_optimizers = optimizers
    module.validation_step = lambda batch, batch_idx: module.log(
        "v", module.teacher(batch[0]).sum()
    )
    module.test_step = module.validation_step
    module.predict_step = lambda batch, batch_idx: module.student(batch[0])


def run_everything(training: Training) -> list[str]:
    """A fit that saves, one that goes on from there, and all kinds of evaluation."""
    calls: list[str] = []

    def fit(num_epochs: int, saved: Any) -> Any:
        it = Session(training, change=configure, ignored=[RESUMING])
        it.module.train_dataloader = lambda: it.loader
        it.module.val_dataloader = it.module.test_dataloader = lambda: labelled(50)
        it.module.predict_dataloader = it.module.val_dataloader
        note_hooks(it.module, calls)
        it.trainer.fit_loop.max_epochs = num_epochs
        it.trainer.fit(it.module, ckpt_path=saved, weights_only=False)
        return it

    saved = fit(2, None).trainer.checkpoint_callback.best_model_path
    it = fit(3, saved)
    it.validate()
    it.test()
    it.trainer.predict(it.module, ckpt_path=saved, weights_only=False)
    return calls


def test_hooks_are_called_on_every_rank_in_the_same_order(tmp_path: Path) -> None:
    arguments = {
        "gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1,
        "enable_checkpointing": True,
    }  # fmt: skip
    expected, results = both(run_everything, replace(BYOL, trainer=arguments), tmp_path)
    assert set(expected) == HOOKS
    # Data is prepared once on each machine.
    elsewhere = [name for name in expected if name != "prepare_data"]
    assert results == [expected, elsewhere]


class Overrides:
    """Hooks that change what the training does."""

    calls: list[str]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and self.current_epoch == 0 else None  # type: ignore[attr-defined]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.global_step)  # type: ignore[attr-defined]
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.global_step % 2:  # type: ignore[attr-defined]
            self.clip_gradients(  # type: ignore[attr-defined]
                optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm"
            )

    def on_after_backward(self) -> None:
        for parameter in self.parameters():  # type: ignore[attr-defined]
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():  # type: ignore[attr-defined]
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=1e-3)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.calls.append(f"{scheduler.get_last_lr()[0]:.4f}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():  # type: ignore[attr-defined]
                parameter.mul_(0.999)
        self.log("always", 1.0, on_epoch=True, on_step=True, batch_size=2)  # type: ignore[attr-defined]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


def override(module: Any) -> None:
    module.__class__ = type("Overriding", (Overrides, type(module)), {})
    module.calls = []
    configure(module)


def fit(training: Training) -> tuple[Trained, list[str]]:
    it = Session(training).fit(validation=labelled(50))
    return it.trained, it.module.calls


def test_hooks_that_change_the_training(tmp_path: Path) -> None:
    expected, results = both(fit, replace(BYOL, change=override), tmp_path, 3)
    torch.testing.assert_close(results[0][0].losses, expected[0].losses, **CLOSE)
    torch.testing.assert_close(results[0][0].weights, expected[0].weights, **CLOSE)
    assert expected[0].global_step == 5
    for trained, calls in results:
        assert calls == expected[1]
        assert trained.global_step == 5
        assert trained.metrics == pytest.approx(expected[0].metrics, rel=1e-9)


def change_batches(module: Any) -> None:
    """Transfer hooks of the module itself, one of which writes in place."""
    module.transferred = []

    def before(batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, dict):
            for view in batch["views"]:
                view.mul_(1.5)
        return batch

    def after(batch: Any, dataloader_idx: int) -> Any:
        module.transferred.append(dataloader_idx)
        return batch

    module.on_before_batch_transfer = before
    module.on_after_batch_transfer = after
    module.validation_step = lambda batch, batch_idx: module.log(
        "v", module.student(batch[0]).sum()
    )


def fit_fresh_batches(training: Training) -> tuple[Trained, int]:
    """Batches are changed in place, so each epoch gets its own."""
    it = Session(training)

    class Fresh:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            return iter(make_epochs(it.module, training.sizes)[0])

    return it.fit(Fresh(), labelled(50)).trained, len(it.module.transferred)


def test_each_batch_is_transferred_once(tmp_path: Path) -> None:
    training = replace(BYOL, change=change_batches)
    expected = run(fit_fresh_batches, alone(training), num_ranks=1, folder=tmp_path)[0]
    results = run(fit_fresh_batches, training, num_ranks=2, folder=tmp_path)
    torch.testing.assert_close(results[0][0].losses, expected[0].losses, **CLOSE)
    assert [count for _, count in results] == [0, expected[1]]


def read_batch_in_a_hook(training: Training) -> str:
    """What a hook that looks into a batch is told on the ranks that have none."""
    it = Session(training)
    told: list[str] = []

    def on_train_batch_end(outputs: Any, batch: Any, batch_idx: int) -> None:
        try:
            batch["views"]
        except ValueError as error:
            told.append(str(error))

    it.module.on_train_batch_end = on_train_batch_end
    it.fit()
    return " ".join(set(told))


def test_batches_in_hooks(tmp_path: Path) -> None:
    loss, data = run(read_batch_in_a_hook, BYOL, folder=tmp_path)
    assert "one rank reads the data for all" in loss
    assert data == ""
