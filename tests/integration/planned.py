"""Trainings whose plan follows costs that the test makes up, on every rank of a job."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from lightning.pytorch import Callback, LightningModule
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe import (
    BlockwiseDistillation,
    BlockwiseRelay,
    FanoutTraining,
    FreezeAndRepack,
    ScheduledFreeze,
    StudentFanout,
    TSPipeStrategy,
)
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.profiling import steps
from lightning_tspipe.profiling.atoms import seconds_of
from lightning_tspipe.strategy.setup import block_costs
from lightning_tspipe.strategy.training import fanout, repacking
from tests.integration.trainings import quiet_trainer, strict, weights_of

WIDTH = 6
Factor = Callable[[int], float]
COSTS: dict[str, Factor] = {
    "rising": lambda place: 1.0 + place**2,
    "falling": lambda place: 1.0 / (1.0 + place**2),
}


@dataclass(frozen=True)
class Planned:
    """A training.

    Attributes:
        kind: Key of ``MODULES``.
        options: Arguments of ``TSPipeStrategy``.
        trainer: Of the Trainer.
        costs: Key of ``COSTS``: what the atoms, heads or blocks seem to cost, by their place.
        per_micro_batch: Seconds that an atom seems to cost whatever the number of samples.
        num_ranks: Devices.
        resume: Checkpoint to go on from.
        saves: Whether to save after each batch.
        frozen: Epoch to number of frozen layers.
        repack: Of ``FreezeAndRepack``.
        relay: Arguments of ``BlockwiseRelay``; None for another training.
    """

    kind: str = "dropout"
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    costs: str = "rising"
    per_micro_batch: float = 0.0
    num_ranks: int = 2
    resume: str = ""
    saves: bool = False
    frozen: dict[int, int] = field(default_factory=dict)
    repack: Any = True
    relay: dict[str, Any] | None = None


@dataclass
class Went:
    """What a rank knows at the end."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    placements: list[Placement]
    told: list[str]
    notes: list[str]


class Classifier(LightningModule):
    """Layers of one kind, one after the other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        extra: Callable[[], list[nn.Module]] = {
            "plain": list,
            "dropout": lambda: [nn.Dropout(0.3)],
            "batchnorm": lambda: [nn.BatchNorm1d(WIDTH)],
        }[kind]  # type: ignore[assignment]
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), *extra(), nn.Tanh()) for _ in range(5)]
        self.student = nn.Sequential(*layers, nn.Linear(WIDTH, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.student(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.2, momentum=0.9)


class Tasks(FanoutTraining, LightningModule):
    """Heads on a trunk, which may draw random numbers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)
        ]
        self.teacher = nn.Sequential(*layers).requires_grad_(requires_grad=False)
        self.student = StudentFanout({f"task{i}": nn.Linear(WIDTH, 3) for i in range(3)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.student(self.teacher(batch[0])), batch[1])

    def head_optimizer(self, name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


class Blocks(BlockwiseDistillation, LightningModule):
    """Blocks that drop out."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.student = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(4))
        )

    def block_loss(self, out: Tensor, target: Tensor, block_idx: int, batch: Any) -> Tensor:
        return F.mse_loss(out, target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.2, momentum=0.9)


MODULES: dict[str, Callable[[], Any]] = {
    **{kind: partial(Classifier, kind) for kind in ("plain", "dropout", "batchnorm")},
    "heads": Tasks,
    "random heads": partial(Tasks, 0.3),
    "blocks": Blocks,
}


class Watch(Callback):
    """Keeps losses and placements; saves."""

    def __init__(self, it: Planned) -> None:
        self.losses: list[Tensor] = []
        self.placements: list[Placement] = []
        self._it = it

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())
        placement = trainer.strategy.engine.placement
        if placement not in self.placements[-1:]:
            self.placements.append(placement)
        if self._it.saves:
            trainer.save_checkpoint(f"step-{trainer.global_step}.ckpt")


def pretend(it: Planned) -> None:
    """Have whatever is measured cost what the test says."""
    factor = COSTS[it.costs]
    measured: Any = steps
    profile_atoms, costs_of = measured.profile_atoms, block_costs.BlockPlanner._costs_of

    def atoms(*args: Any, **kwargs: Any) -> Any:
        found = profile_atoms(*args, **kwargs)
        if kwargs.get("flops_per_second") is not None:
            return found

        def priced(times: Any, place: int) -> dict[int, float]:
            return {size: it.per_micro_batch + 1e-2 * factor(place) * size for size in times}

        kinds = ("forward", "backward", "input_backward", "weight_backward")
        return [
            replace(record, **{kind: priced(getattr(record, kind), place) for kind in kinds})
            for place, record in enumerate(found)
        ]

    def block(planner: Any, pair: Any, sizes: Any) -> Any:
        found = costs_of(planner, pair, sizes)
        if planner._options.plans_by_flops:
            return found
        seconds = {size: factor(pair.index) * size for size in found.teacher}
        return replace(found, teacher=seconds, student=seconds, update=0.0)

    heads = iter(range(100))

    def head(run: Any, *how: Any) -> float:
        if how[2:] and how[2] is not None:  # operations are counted
            return seconds_of(run, *how)
        return 0.0 if run.__name__ == "inputs" else 0.1 * factor(next(heads))

    measured.profile_atoms = atoms
    vars(block_costs)["BlockPlanner"]._costs_of = block
    vars(fanout)["seconds_of"] = head


class Notes(logging.Handler):
    """What users are told in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def train(it: Planned) -> Went:
    """Fit, and tell what this rank has then."""
    strict(".*`weights_only` was not set", "Deterministic behavior was enabled")
    pretend(it)
    notes = Notes()
    rank_zero.log.addHandler(notes)
    torch.manual_seed(0)
    module = MODULES[it.kind]()
    watch = Watch(it)
    callbacks: list[Callback] = [watch]
    if it.frozen:
        policy = ScheduledFreeze(it.frozen)
        callbacks.append(FreezeAndRepack(policy, repack=it.repack, cache=None))
    if it.relay is not None:
        callbacks.append(BlockwiseRelay(profile_cache=None, profile_steps=1, **it.relay))
    trainer = quiet_trainer(
        devices=it.num_ranks, strategy=TSPipeStrategy(**it.options), callbacks=callbacks,
        **{"max_epochs": 2, **it.trainer},
    )  # fmt: skip
    numbers = torch.Generator().manual_seed(1)
    data = torch.randn(32, WIDTH, generator=numbers), torch.randint(3, (32,), generator=numbers)
    loader = DataLoader(TensorDataset(*data), batch_size=8, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        trainer.fit(module, loader, ckpt_path=it.resume or None, weights_only=True)
    told = [str(one.message) for one in caught if "plan" in str(one.message)]
    return Went(watch.losses, weights_of(module), watch.placements, told, notes.told)


def train_as_planned(it: Planned) -> Went:
    """Fit where layers froze before; no plan is made for them."""

    def choose(*_: Any) -> None:
        raise AssertionError("the checkpoint has the plan")

    vars(repacking)["choose"] = choose
    return train(it)
