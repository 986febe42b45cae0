"""Trainings in which layers freeze, as functions that run on every rank of a job."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_tspipe import (
    AutoCache,
    FreezeAndRepack,
    MomentumEMA,
    ScheduledFreeze,
    TSPipeStrategy,
)
from lightning_tspipe.caching import WithIds
from tests.integration.trainings import metrics_of, quiet_trainer, strict, weights_of

WIDTH, NUM_CLASSES, NUM_BLOCKS = 6, 3, 5


@dataclass(frozen=True)
class Case:
    """A training with frozen layers.

    Attributes:
        strategy: ``tspipe`` for an instance made from ``options``, else a name.
        num_ranks: Devices.
        options: Arguments of ``TSPipeStrategy``.
        frozen: Epoch to number of frozen layers.
        repack: Of ``FreezeAndRepack``.
        num_active: Of ``FreezeAndRepack``.
        num_samples: Samples of the data set.
        batch_size: Of the loader.
        epochs: Epochs.
        save_at: Optimizer step after which a checkpoint is saved; 0: never.
        resume: Whether to go on from it.
        normalised: Whether the blocks have BatchNorm.
        validates: Whether there is a validation in each epoch.
        compares: Whether to compare what every rank holds before and after a transition.
        shuffle: Of the loader.
        cache: Whether activations are cached, worth it or not.
        memory: Bytes for them.
        disk: Bytes on disk for them.
        with_ids: Whether samples that are cached have ids.
        drop_last: Of the loader.
        averaged: Whether the student's weights and statistics are averaged, and the average
            validated too.
        draws: Whether the step draws a random number, the same in all replicas.
        draws_samples: Whether it draws one for each of its samples.
    """

    strategy: str = "tspipe"
    num_ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    frozen: dict[int, int] = field(default_factory=lambda: {1: 2, 2: 4})
    repack: Any = False
    num_active: int = 2
    num_samples: int = 20
    batch_size: int = 8
    epochs: int = 3
    save_at: int = 0
    resume: bool = False
    normalised: bool = False
    validates: bool = False
    compares: bool = False
    shuffle: bool = True
    cache: bool = False
    memory: int = 8_000_000
    disk: int = 0
    with_ids: bool = True
    drop_last: bool = False
    averaged: bool = False
    draws: bool = False
    draws_samples: bool = False


class Block(nn.Module):
    """A residual block; BatchNorm in it, if any, freezes with it."""

    def __init__(self, *, normalised: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if normalised else nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.linear(x)).tanh()
        return out


class Net(nn.Module):
    """Stem, blocks, head."""

    def __init__(self, *, normalised: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.Sequential(*(Block(normalised=normalised) for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)))
        return out


class Module(LightningModule):
    """A classifier with a temperature outside of the network, AdamW and a schedule."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._draws, self._draws_samples = case.draws, case.draws_samples
        torch.manual_seed(0)
        self.student = Net(normalised=case.normalised)
        self.scale = nn.Parameter(torch.ones(()))
        if case.averaged:
            self.average = deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, *_ = batch
        if self._draws_samples:
            x = x + torch.randn(x.shape)
        loss = F.cross_entropy(self.student(x) * self.scale, y)
        return loss * torch.rand(()) if self._draws else loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Validated(Module):
    """The same, validated."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = F.cross_entropy(self.student(x), y)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(y))
        if hasattr(self, "average"):
            loss = F.cross_entropy(self.average(x), y)
            self.log("val_loss_of_average", loss, sync_dist=True, batch_size=len(y))


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random samples; tells which ones were read."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(number, 4, generator=generator)
        self._y = torch.randint(NUM_CLASSES, (number,), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self._x[index], self._y[index]


class Watch(Callback):
    """Keeps what happens on this rank, epoch by epoch.

    Args:
        samples: The data.
        case: Says when to save.
    """

    def __init__(self, samples: Samples, case: Case) -> None:
        self.losses: list[float] = []
        self.read: list[list[int]] = []
        self.stages: list[int] = []
        self.ran_ahead: list[bool] = []
        self.moved: list[str] = []
        self._samples, self._case = samples, case

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        pipelined = getattr(trainer.strategy, "pipelined", None)
        self.ran_ahead.append(pipelined is not None and bool(pipelined.teacher_ran_ahead))
        if self._case.save_at == trainer.global_step and not self._case.resume:
            trainer.save_checkpoint("last.ckpt")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self._case.compares and trainer.current_epoch in self._case.frozen:
            self._compare(trainer, module)

    def _compare(self, trainer: Any, module: Any) -> None:
        """What changed, bitwise, since the end of the epoch before; every rank holds all of it."""
        before = torch.load("epoch.ckpt", weights_only=False)
        for name, value in module.state_dict().items():
            if value.is_meta or not torch.equal(value.cpu(), before["state_dict"][name].cpu()):
                self.moved.append(name)
        optimizer = trainer.optimizers[0]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, state in before["optimizer_states"][0]["state"].items():
            for key, value in state.items():
                if not torch.equal(optimizer.state[parameters[index]][key].cpu(), value.cpu()):
                    self.moved.append(f"{index}: {key}")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self._case.compares:
            trainer.save_checkpoint("epoch.ckpt")
        self.read.append(list(self._samples.read))
        self._samples.read.clear()
        self.stages.append(getattr(trainer.strategy, "num_ranks", 1))


@dataclass
class Found:
    """What a rank knows at the end."""

    losses: list[float]
    read: list[list[int]]
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    rates: list[float]
    history: list[dict[str, Any]]
    num_ranks: list[int]
    replicas: int
    global_step: int
    metrics: dict[str, float]
    ran_ahead: list[bool]
    moved: list[str]


class AtEnd(Callback):
    """Collects the optimizer's state while the stages are in place."""

    state: dict[str, Any]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.state = trainer.strategy.optimizer_state(trainer.optimizers[0])


def train(case: Case) -> Found:
    """Fit, and tell what this rank has then."""
    strict(".*sync_dist=True.*")
    module = (Validated if case.validates else Module)(case)
    samples, end = Samples(case.num_samples), AtEnd()
    callback = FreezeAndRepack(ScheduledFreeze(case.frozen), repack=case.repack,
                               num_active=case.num_active)  # fmt: skip
    if case.cache:
        budgets: Any = {"memory": case.memory, "disk": case.disk, "folder": "."}
        callback.cache = AutoCache("student", **budgets, always=True)
    watch = Watch(samples, case)
    averages = [MomentumEMA(0.8, teacher="average", buffers="average")] if case.averaged else []
    strategy: Any = case.strategy
    if strategy == "tspipe":
        strategy = TSPipeStrategy(student="student", **case.options)
    trainer = quiet_trainer(
        devices=case.num_ranks, strategy=strategy, max_epochs=case.epochs,
        callbacks=[callback, *averages, watch, end],
    )  # fmt: skip
    torch.manual_seed(3)
    data_set: Any = WithIds(samples, inputs=0) if case.cache and case.with_ids else samples
    loader = DataLoader(data_set, case.batch_size, shuffle=case.shuffle, drop_last=case.drop_last)
    if strategy == "ddp":  # Lightning's own sampler shuffles
        rank = int(os.environ["LOCAL_RANK"])
        sampler: Any = DistributedSampler(samples, case.num_ranks, rank, shuffle=False)
        loader = DataLoader(samples, case.batch_size, sampler=sampler)
    data: list[Any] = [loader]
    if case.validates:
        data.append(DataLoader(Samples(12), 6))
    path = Path("last.ckpt") if case.resume else None
    trainer.fit(module, *data, ckpt_path=path, weights_only=False)
    return Found(
        watch.losses, watch.read, weights_of(module), end.state,
        [group["lr"] for group in trainer.optimizers[0].param_groups], callback.history,
        watch.stages, trainer.world_size, trainer.global_step, metrics_of(trainer),
        watch.ran_ahead, watch.moved,
    )  # fmt: skip
