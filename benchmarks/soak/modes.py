"""The modes that are soaked: tiny models, so that thousands of batches take seconds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from lightning_tspipe import (
    AutoCache,
    BlockwiseDistillation,
    BlockwiseRelay,
    DelayedTeacherUpdate,
    FanoutTraining,
    FreezeAndRepack,
    MomentumEMA,
    ScheduledFreeze,
    StudentFanout,
    TSPipeStrategy,
)
from lightning_tspipe.caching import WithIds

WIDTH, BATCH_SIZE = 16, 8
EPOCH = 250
"""Batches of an epoch."""


def layers(number: int) -> nn.Sequential:
    """Layers, each of which is an atom."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number))
    )


class Averaged(LightningModule):
    """A student that follows its own average."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = layers(4), layers(4)
        self.teacher.load_state_dict(self.student.state_dict())

    @override
    def training_step(self, batch: Any) -> Tensor:
        x, y = batch[:2]
        loss = mse_loss(self.student(x), self.teacher(y))
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.student(batch[0]).square().mean())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-3)


class Plain(Averaged):
    """A student alone."""

    def __init__(self) -> None:
        super().__init__()
        del self.teacher

    @override
    def training_step(self, batch: Any) -> Tensor:
        x, y = batch[:2]
        loss = mse_loss(self.student(x), y)
        self.log("loss", loss)
        return loss


class WithMomentum(Plain):
    """With the optimizer by which ``spectrain`` predicts."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=1e-3, momentum=0.9)


class Tasks(FanoutTraining, LightningModule):
    """Three heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = layers(4).requires_grad_(False).eval()
        self.student = StudentFanout({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})

    @override
    def training_step(self, batch: Any) -> Tensor:
        loss = mse_loss(self.student(self.teacher(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    @override
    def head_optimizer(self, name: str, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)


class Blocks(BlockwiseDistillation, LightningModule):
    """Blocks that learn from a teacher's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = layers(4), layers(4)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-3)


def averaging() -> list[Callback]:
    """What :class:`Averaged` needs."""
    return [MomentumEMA(), DelayedTeacherUpdate()]


def saving() -> list[Callback]:
    """A checkpoint every 100 batches, of which one stays."""
    return [*averaging(), ModelCheckpoint("saved", every_n_train_steps=100)]


def freezing() -> list[Callback]:
    """Two layers are frozen at the second epoch; what they return is kept."""
    return [
        FreezeAndRepack(ScheduledFreeze({1: 2}), cache=AutoCache(memory="8MB", always=True)),
    ]


@dataclass(frozen=True)
class Mode:
    """How to train.

    Attributes:
        module: What is trained.
        callbacks: Makes callbacks.
        options: Of the strategy.
        trainer: Further arguments of the Trainer.
        num_ranks: Processes.
        has_ids: Whether samples carry their numbers.
        plugins: Makes plugins.
    """

    module: Callable[[], LightningModule]
    callbacks: Callable[[], list[Callback]] = list
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    has_ids: bool = False
    plugins: Callable[[], list[Any]] = list


SAVES = {"enable_checkpointing": True}
MODES = {
    "tspipe": Mode(Averaged, averaging),
    "gpipe": Mode(Averaged, lambda: [MomentumEMA()], {"schedule": "gpipe"}),
    "sequential": Mode(Averaged, lambda: [MomentumEMA()], {"schedule": "sequential"}),
    **{
        weights: Mode(
            WithMomentum if weights == "spectrain" else Plain,
            options={"schedule": "1f1b", "weights": weights},
            trainer={"accumulate_grad_batches": 2 if weights == "2bw" else 1},
        )
        for weights in ("pipeoptim", "pipedream", "2bw", "spectrain")
    },
    "fanout": Mode(Tasks),
    "relay": Mode(Blocks, lambda: [BlockwiseRelay(profile_steps=5, profile_cache=None)]),
    "freeze": Mode(Plain, lambda: [FreezeAndRepack(ScheduledFreeze({1: 2}), cache=None)]),
    "freeze-cache": Mode(Plain, freezing, has_ids=True),
    "fanout-cache": Mode(
        Tasks, lambda: [AutoCache(memory="8MB", always=True)], has_ids=True
    ),
    "2x2": Mode(Averaged, averaging, {"num_stages": 2}, num_ranks=4),
    "validation": Mode(Averaged, averaging, trainer={"val_check_interval": 100}),
    "files": Mode(Averaged, saving, trainer=SAVES),
    "files-async": Mode(Averaged, saving, trainer=SAVES, plugins=lambda: [AsyncCheckpointIO()]),
    "shards": Mode(Averaged, saving, {"save_distributed_checkpoint": True}, trainer=SAVES),
    "shards-async": Mode(
        Averaged, saving, {"save_distributed_checkpoint": True}, trainer=SAVES,
        plugins=lambda: [AsyncCheckpointIO()],
    ),
}  # fmt: skip


def train(name: str, steps: int, watch: Callback) -> None:
    """Train for so many batches, on each rank."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    mode = MODES[name]
    data: Dataset[Any] = TensorDataset(*torch.randn(2, EPOCH * BATCH_SIZE * _replicas(mode), WIDTH))
    if mode.has_ids:
        data = WithIds(data, inputs=0)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True)
    validates = "val_check_interval" in mode.trainer
    trainer = Trainer(
        strategy=TSPipeStrategy(num_microbatches=_microbatches(mode), **mode.options),
        accelerator="cpu", devices=mode.num_ranks, max_epochs=-(-steps // EPOCH), logger=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=mode.plugins(),
        callbacks=[*mode.callbacks(), watch],
        **{"enable_checkpointing": False, **mode.trainer},
    )  # fmt: skip
    validation = DataLoader(TensorDataset(torch.randn(32, WIDTH)), BATCH_SIZE)
    trainer.fit(mode.module(), loader, validation if validates else None)


def _replicas(mode: Mode) -> int:
    return mode.num_ranks // int(mode.options.get("num_stages", mode.num_ranks))


def _microbatches(mode: Mode) -> int:
    return 1 if mode.options.get("schedule") in {"1f1b", "sequential"} else 2
