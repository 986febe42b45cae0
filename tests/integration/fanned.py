"""Trainings of heads on a trunk by a real Trainer, as functions that run on every rank."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_tspipe import HeadCheckpoint, HeadEarlyStopping, TSPipeStrategy
from tests.exactness.fanout import Loader, Tasks, make_batches


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
        module: What is trained, by name in this file.
    """

    num_heads: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (5, 5, 5, 3)
    trainer: dict[str, Any] = field(default_factory=dict)
    patience: int = 0
    diverges: str = ""
    validates: bool = True


@dataclass
class Outcome:
    """What a rank knows at the end."""

    weights: dict[str, dict[str, Tensor]]
    metrics: dict[str, float]
    stopped: dict[str, str]
    heads: tuple[str, ...]
    depth: int


class Diverging(Tasks):
    """One of its heads diverges."""

    diverges = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss / 0 if self.head == self.diverges and self.global_step >= 3 else loss


def train(job: Fanned, num_ranks: int) -> Outcome:
    """Train in this folder; the weights are there on rank 0."""
    warnings.filterwarnings("ignore")
    module = Diverging(job.num_heads, on_nan="stop" if job.diverges else "raise")
    module.diverges = job.diverges
    here: list[tuple[tuple[str, ...], int]] = []

    class Watch(HeadCheckpoint):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            here.append((pl_module.student.here, trainer.strategy.engine.placement.depth))

    callbacks: list[Any] = [Watch("val_loss" if job.validates else "loss")]
    if job.patience:
        callbacks.append(HeadEarlyStopping(patience=job.patience, min_delta=0.2))
    arguments: dict[str, Any] = {
        "max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": False,
        "logger": CSVLogger("."), "log_every_n_steps": 1,
    }  # fmt: skip
    trainer = Trainer(
        strategy=TSPipeStrategy(**job.options), accelerator="cpu", devices=num_ranks,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
        default_root_dir=".", callbacks=callbacks, **arguments | job.trainer,
    )  # fmt: skip
    validation = Loader(make_batches((4, 2))) if job.validates else None
    trainer.fit(module, Loader(make_batches(job.sizes)), validation)
    weights = {}
    if trainer.is_global_zero:
        weights = {
            name: {key: value.clone() for key, value in head.state_dict().items()}
            for name, head in module.student.heads.items()
        }
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    heads, depth = here[-1]
    return Outcome(weights, metrics, dict(module.student.stopped), heads, depth)


def files(folder: Path) -> dict[str, Any]:
    """The heads that were written."""
    return {path.stem: torch.load(path) for path in (folder / "heads").glob("*.ckpt")}
