"""Blockwise trainings by a real Trainer, as functions that run on every rank of a job."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_tspipe import BlockwiseDistillation, BlockwiseRelay
from tests.exactness.relay_reference import train_blocks
from tests.integration.trainings import (
    RESUMING,
    Epochs,
    metrics_of,
    quiet_trainer,
    strict,
    weights_of,
)

CHANNELS = (3, 4, 5, 4, 6, 4, 5, 3, 4)


def conv(index: int, *, student: bool, norm: bool = True) -> nn.Module:
    """A block: the student's is thinner inside, and has a stride where the teacher's has one."""
    before, after = CHANNELS[index], CHANNELS[index + 1]
    stride = 2 if index == 2 else 1
    if not student:
        layers = [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers)
    thin = [nn.Conv2d(before, 2, 1, stride), *([nn.BatchNorm2d(2)] if norm else []), nn.ReLU()]
    return nn.Sequential(*thin, nn.Conv2d(2, after, 3, 1, 1), *([nn.BatchNorm2d(after)] * norm))


class Net(nn.Module):
    """Blocks in a row that no list names."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, block in enumerate(blocks):
            self.add_module(f"part{index}", block)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


KINDS = {"sequential": lambda blocks: nn.Sequential(*blocks), "list": nn.ModuleList, "net": Net}


class Blocks(BlockwiseDistillation, LightningModule):
    """Small convolutional blocks; the loss also reads labels where ``labelled``."""

    def __init__(
        self,
        num_blocks: int,
        *,
        labelled: bool = False,
        norm: bool = True,
        optimizer: str = "one",
        network: str = "sequential",
    ) -> None:
        super().__init__()
        make: Any = KINDS[network]
        if network == "net":
            names = [f"part{i}" for i in range(1, num_blocks)]
            self.block_boundaries = {"teacher": names, "student": names}
        self.teacher = make([conv(i, student=False) for i in range(num_blocks)])
        self.student = make([conv(i, student=True, norm=norm) for i in range(num_blocks)])
        for layer in self.teacher.modules():
            if isinstance(layer, nn.BatchNorm2d):  # a teacher that has been trained
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2.0)
        self.labelled = labelled
        self.kind = optimizer
        self.automatic_optimization = optimizer == "one"

    def block_loss(
        self, student_out: Tensor, teacher_out: Tensor, block_idx: int, batch: Any
    ) -> Tensor:
        loss = F.mse_loss(student_out, teacher_out)
        if self.labelled and block_idx % 2:
            loss = loss + 0.1 * F.cross_entropy(student_out.mean((2, 3)), batch[1] % 3)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        for block in self.student.children():
            x = block(x)
        self.log("val", x.square().mean(), batch_size=len(x))
        target = batch[0]  # the teacher's part: nothing of it may meet what is relayed
        for block in self.teacher.children():
            target = block(target)
        self.log("val_distance", F.mse_loss(x, target), batch_size=len(x))

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return sgd(self.student.parameters())
        return [sgd(block.parameters()) for block in self.student.children()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def batches(sizes: Sequence[int], seed: int = 0) -> list[Any]:
    """Images and labels."""
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 3, 8, 8, generator=random), torch.randint(9, (n,), generator=random))
        for n in sizes
    ]


@dataclass(frozen=True)
class Relay:
    """What a Trainer gets.

    Attributes:
        num_blocks: Blocks of both networks.
        options: Of ``BlockwiseRelay``.
        num_ranks: Devices; 1 with a plain strategy.
        module: Of ``Blocks``.
        sizes: Batch sizes of each epoch.
        trainer: Of the Trainer.
    """

    num_blocks: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    module: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, ...], ...] = ((5, 6, 3), (5, 6, 3))
    trainer: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Blocks:
        torch.manual_seed(0)
        return Blocks(self.num_blocks, **self.module)

    def epochs(self) -> list[list[Any]]:
        return [batches(sizes, seed) for seed, sizes in enumerate(self.sizes)]


@dataclass
class Relayed:
    """What a rank knows at the end."""

    weights: dict[str, Tensor]
    metrics: dict[str, float]
    global_step: int
    forwards: dict[int, int]
    bytes_loaded: int = 0


def relay_trainer(relay: Relay, *callbacks: Any) -> Any:
    """The Trainer; quiet unless asked otherwise."""
    options = {"profile_cache": None, "profile_steps": 1, **relay.options}
    return quiet_trainer(
        devices=relay.num_ranks, strategy="tspipe" if relay.num_ranks > 1 else "auto",
        callbacks=[BlockwiseRelay(**options), *callbacks],
        **{"max_epochs": len(relay.sizes), **relay.trainer},
    )  # fmt: skip


class Counts(Callback):
    """Keeps how often the teacher ran on this rank, and what was read."""

    def __init__(self) -> None:
        self.forwards: dict[int, int] = {}
        self.bytes_loaded = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            self.forwards, self.bytes_loaded = dict(engine.forwards), engine.bytes_loaded


class Saves(Callback):
    """Saves once, while gradients wait for those of the next batch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 0 and trainer.fit_loop.total_batch_idx == 2:
            trainer.save_checkpoint("accumulating.ckpt")


def train(relay: Relay) -> Relayed:
    """Fit, and tell what this rank has then."""
    strict()
    module, counts = relay.build(), Counts()
    callbacks: list[Any] = [counts]
    if "accumulate_grad_batches" in relay.trainer:
        callbacks.append(Saves())
    trainer = relay_trainer(relay, *callbacks)
    trainer.fit(module, Epochs(relay.epochs()), Epochs([batches((4, 3), seed=9)]))
    return Relayed(
        weights_of(module), metrics_of(trainer), trainer.global_step, counts.forwards,
        counts.bytes_loaded,
    )  # fmt: skip


def resume(relay: Relay, file: str) -> Relayed:
    """Go on from a checkpoint."""
    strict(RESUMING)
    module = relay.build()
    trainer = relay_trainer(relay)
    trainer.fit(module, Epochs(relay.epochs()), Epochs([batches((4, 3), seed=9)]), ckpt_path=file)
    return Relayed(weights_of(module), {}, trainer.global_step, {})


class TwoRounds(Blocks):
    """Weights learn in every step, norms in some, from other pictures, with their own optimizer."""

    def block_rounds(self, batch_idx: int) -> Sequence[str]:
        return ("weights", "norms") if batch_idx % 2 == 0 else ("weights",)

    def block_input(self, batch: Any, round_name: str = "weights") -> Tensor:
        x: Tensor = batch[0]
        return x if round_name == "weights" else x.flip(3)

    def round_optimizers(self, round_name: str) -> Sequence[Any]:
        return self.all_optimizers()[:1] if round_name == "weights" else self.all_optimizers()[1:]

    def configure_optimizers(self) -> Any:
        parameters = list(self.student.parameters())
        norms = [p for p in parameters if p.dim() == 1]
        # No Adam: of biases in front of a norm, whose gradients are zero, it sees the rounding.
        return [sgd(p for p in parameters if p.dim() > 1), torch.optim.SGD(norms, lr=0.01)]


def train_two_rounds(relay: Relay) -> Relayed:
    """An alternating training."""
    strict()
    torch.manual_seed(0)
    module = TwoRounds(relay.num_blocks, optimizer="rounds")
    trainer = relay_trainer(relay)
    trainer.fit(module, Epochs(relay.epochs()), Epochs([batches((4,))]))
    return Relayed(weights_of(module), metrics_of(trainer), trainer.global_step, {})


class Broken(Blocks):
    """Breaks in the second epoch, in the last block."""

    broken = ""

    def block_loss(
        self, student_out: Tensor, teacher_out: Tensor, block_idx: int, batch: Any
    ) -> Tensor:
        loss = super().block_loss(student_out, teacher_out, block_idx, batch)
        if block_idx < 3 or self.trainer.current_epoch == 0:
            return loss
        if self.broken == "nan":
            return loss * float("nan")
        if self.broken == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no block")


def train_broken(broken: str) -> None:
    """A training that fails."""
    strict()
    relay = Relay(options={"partition": [2, 2]})
    module = Broken(4)
    module.broken = broken
    relay_trainer(relay).fit(module, Epochs(relay.epochs()), Epochs([batches((4,))]))


def train_all(relays: Sequence[Relay]) -> list[Relayed]:
    """Several trainings, one after the other."""
    return [train(relay) for relay in relays]


def reference(relay: Relay) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The same in plain lines: all weights, and the epochs' mean losses."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = copy.deepcopy(relay.build())
        means = train_blocks(
            list(module.teacher.children()), list(module.student.children()), module.block_loss,
            sgd, relay.epochs(),
        )  # fmt: skip
        return dict(module.state_dict()), means
    finally:
        torch.set_default_dtype(before)
