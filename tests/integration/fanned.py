"""Trainings of heads on a trunk by a real Trainer, as functions that run on every rank."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_tspipe import HeadCheckpoint, HeadEarlyStopping, StudentFanout, TSPipeStrategy
from tests.exactness.fanout import (
    WIDTH,
    Loader,
    Tasks,
    make_batches,
    make_heads,
    make_trunk,
)
from tests.integration.trainings import metrics_of, quiet_trainer


@dataclass(frozen=True)
class Fanned:
    """What is trained.

    Attributes:
        num_heads: How many heads.
        options: Arguments of the strategy.
        sizes: Of the batches.
        trainer: Further arguments of the Trainer.
        patience: Of ``HeadEarlyStopping``; 0: none.
        diverges: The head whose loss is not finite after a while.
        validates: Whether there are validation batches.
        checkpoint: To go on from.
    """

    num_heads: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (5, 5, 5, 3)
    trainer: dict[str, Any] = field(default_factory=dict)
    patience: int = 0
    diverges: str = ""
    validates: bool = True
    checkpoint: str | None = None


@dataclass
class Outcome:
    """What a rank knows at the end."""

    weights: dict[str, dict[str, Tensor]]
    metrics: dict[str, float]
    stopped: dict[str, str]
    heads: tuple[str, ...]
    depth: int
    logged_early: set[str]


class Diverging(Tasks):
    """One of its heads diverges."""

    diverges = ""

    def __init__(self, num_heads: int, *, on_nan: Any = "raise") -> None:
        super().__init__(num_heads, on_nan=on_nan)
        self.mean = nn.ModuleDict({name: MeanMetric() for name in self.student.heads})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean[self.head].update(loss.detach())
        self.log("mean", self.mean[self.head], on_step=False, on_epoch=True)
        return loss / 0 if self.head == self.diverges and self.global_step >= 3 else loss


def train(job: Fanned, num_ranks: int) -> Outcome:
    """Train in this folder; the weights are there on rank 0."""
    warnings.filterwarnings("ignore")
    module = Diverging(job.num_heads, on_nan="stop" if job.diverges else "raise")
    module.diverges = job.diverges
    here: list[tuple[tuple[str, ...], int]] = []
    early: set[str] = set()

    class Watch(HeadCheckpoint):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 0 and trainer.is_global_zero and trainer.logger:
                early.update(trainer.logger.experiment.metrics_keys)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            here.append((pl_module.student.here, trainer.strategy.engine.placement.depth))

    callbacks: list[Any] = [Watch("val_loss" if job.validates else "loss")]
    if job.patience:
        callbacks.append(HeadEarlyStopping(patience=job.patience, min_delta=0.2))
    arguments: dict[str, Any] = {"max_epochs": 2, "logger": CSVLogger("."), **job.trainer}
    trainer = quiet_trainer(
        strategy=TSPipeStrategy(**job.options), devices=num_ranks, precision="64-true",
        callbacks=callbacks, **arguments,
    )  # fmt: skip
    validation = Loader(make_batches((4, 2))) if job.validates else None
    batches = Loader(make_batches(job.sizes))
    trainer.fit(module, batches, validation, ckpt_path=job.checkpoint)
    weights = {}
    if trainer.is_global_zero:
        weights = {
            name: {key: value.clone() for key, value in head.state_dict().items()}
            for name, head in module.student.heads.items()
        }
    heads, depth = here[-1]
    return Outcome(weights, metrics_of(trainer), dict(module.student.stopped), heads, depth, early)


class Plain(LightningModule):
    """Heads without ``FanoutTraining``."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = make_trunk(), StudentFanout(make_heads(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.student(self.teacher(batch[0])).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Killed(Tasks):
    """Its second rank ends without a word."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def break_it(change: str) -> None:
    """Train something that can't be trained."""
    warnings.filterwarnings("ignore")
    module: Any = Diverging(2)
    if change == "thawed":
        next(module.teacher.parameters()).requires_grad_(True)
    elif change == "wide":
        module.student = StudentFanout({"task0": nn.Linear(WIDTH + 1, 3)})
    elif change == "inf":
        module.diverges = "task1"
    elif change == "by hand":
        module.automatic_optimization = False
    else:
        module = Plain() if change == "plain" else Killed(2)
    trainer = quiet_trainer(strategy="tspipe", devices=2, max_epochs=3, precision="64-true")
    trainer.fit(module, Loader())


def files(folder: Path) -> dict[str, Any]:
    """The heads that were written."""
    return {path.stem: torch.load(path) for path in (folder / "heads").glob("*.ckpt")}
