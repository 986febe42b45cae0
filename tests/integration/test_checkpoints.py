"""Checkpoints are ordinary Lightning files: what is in them is what a plain run would save."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from lightning_tspipe import DelayedTeacherUpdate
from tests.exactness.modules import images
from tests.integration.jobs import run
from tests.integration.trainings import (
    CLOSE,
    RESUMING,
    Session,
    Trained,
    Training,
    train,
)


def best_and_last() -> list[Any]:
    return [
        DelayedTeacherUpdate(),
        ModelCheckpoint("best", "{step}", monitor="train_loss", save_top_k=2, save_last=True,
                        every_n_train_steps=1),
        ModelCheckpoint("weights", "{step}", save_weights_only=True, every_n_train_steps=3,
                        save_top_k=-1),
    ]  # fmt: skip


BYOL = Training(
    "Byol-batch-2-by hand", "instance", {"num_microbatches": 1}, optimizer="adamw",
    callbacks=best_and_last, trainer={"enable_checkpointing": True},
)  # fmt: skip


def saved(folder: Path) -> dict[str, set[str]]:
    return {
        kind: {path.name for path in (folder / kind).glob("*.ckpt")} for kind in ("best", "weights")
    }


def load(path: Path) -> dict[str, Any]:
    """As careful users do: nothing but plain values and tensors may be in it."""
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return state


def test_the_best_the_last_and_the_weights_alone(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    run(train, replace(BYOL, strategy="auto", num_ranks=1), num_ranks=1, folder=alone)
    run(train, BYOL, num_ranks=2, folder=together)
    assert saved(together) == saved(alone)
    assert "last.ckpt" in saved(together)["best"]
    for path in (together / "weights").glob("*.ckpt"):
        content = load(path)
        assert not content.keys() & {"optimizer_states", "lightning_tspipe"}
        expected = load(alone / "weights" / path.name)["state_dict"]
        torch.testing.assert_close(content["state_dict"], expected, **CLOSE)


def train_async(training: Training) -> None:
    """The same checkpoints twice, once written by a thread while the training goes on."""
    for plugins, folder in (([], "sync"), ([AsyncCheckpointIO()], "async")):
        callback = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        Session(replace(training, callbacks=list), callback, plugins=plugins).fit()


def test_saving_while_the_training_goes_on(tmp_path: Path) -> None:
    run(train_async, replace(BYOL, sizes=((4, 4, 4),)), folder=tmp_path)
    files = sorted((tmp_path / "sync").glob("*.ckpt"))
    assert len(files) == 3
    for path in files:
        ours, theirs = load(tmp_path / "async" / path.name), load(path)
        torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], **CLOSE)
        ours, theirs = ours["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"]
        torch.testing.assert_close(ours, theirs, **CLOSE)


def train_by_the_clock(training: Training) -> list[str]:
    """After so many seconds there is a checkpoint; rank 0's clock counts."""
    due = timedelta(days=1) if os.environ.get("LOCAL_RANK") == "1" else timedelta(microseconds=1)
    timed = ModelCheckpoint("timed", "{step}", save_top_k=-1, train_time_interval=due)
    train(replace(training, callbacks=lambda: [timed]))
    return sorted(path.stem for path in Path("timed").iterdir())


def test_checkpoints_by_the_clock_of_rank_0(tmp_path: Path) -> None:
    training = replace(BYOL, sizes=((4, 4, 4),))
    saved = run(train_by_the_clock, training, folder=tmp_path)
    assert saved[0] == ["step=1", "step=2", "step=3"]
    assert load(tmp_path / "timed" / "step=2.ckpt")["global_step"] == 2


class Configured:
    """A module that is built from its hyperparameters."""

    @staticmethod
    def of(world: str) -> Any:
        base = importlib.import_module(world).LightningModule

        class Module(base):  # type: ignore[misc, valid-type]
            def __init__(self, width: int = 5) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.student = nn.Sequential(nn.Flatten(), nn.Linear(75, width), nn.Tanh(),
                                             nn.Linear(width, 2))  # fmt: skip

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.student(batch).square().mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        return Module


def fit_and_load(world: str) -> tuple[dict[str, Any], dict[str, Any]]:
    kind = Configured.of(world)
    training = replace(BYOL, world=world, strategy="tspipe", callbacks=list)
    it = Session(training, module=kind(width=7), max_epochs=1)
    it.fit(DataLoader(images(12, 0), batch_size=4))
    it.trainer.save_checkpoint("module.ckpt")
    loaded = kind.load_from_checkpoint("module.ckpt")
    assert loaded.hparams.width == 7
    return it.module.state_dict(), loaded.state_dict()


@pytest.mark.parametrize("world", ["lightning.pytorch", "pytorch_lightning"])
def test_load_from_checkpoint(world: str, tmp_path: Path) -> None:
    trained, loaded = run(fit_and_load, world, folder=tmp_path)[0]
    torch.testing.assert_close(loaded, trained, rtol=0, atol=0)


def go_on(training: Training, path: str) -> tuple[Trained, float]:
    it = Session(training, ignored=[RESUMING]).fit(ckpt_path=path)
    [updates] = {int(s["step"]) for s in it.trainer.optimizers[0].state.values()}
    return it.trained, updates


def test_several_devices_go_on_from_it(tmp_path: Path) -> None:
    """With the same batches on each: then they do what one device does."""
    run(train, BYOL, folder=tmp_path)
    path = str(tmp_path / "best" / "last.ckpt")
    again = {"max_epochs": 3, "use_distributed_sampler": False}
    ddp = replace(BYOL, strategy="ddp", callbacks=list, trainer=again)
    plain = replace(ddp, strategy="auto", num_ranks=1)
    expected, _ = run(go_on, plain, path, num_ranks=1, folder=tmp_path)[0]
    assert len(expected.losses) == 4
    for trained, updates in run(go_on, ddp, path, folder=tmp_path):
        assert trained.global_step == updates == 12
        torch.testing.assert_close(trained.losses, expected.losses, **CLOSE)
        torch.testing.assert_close(trained.weights, expected.weights, **CLOSE)
