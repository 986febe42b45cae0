"""Trainings by a real Trainer, as functions that run on every rank of a job."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule
from pytorch_lightning import Callback as OtherCallback
from torch import Tensor

from lightning_tspipe import DelayedTeacherUpdate, TSPipeStrategy
from tests.device import SHARED, on_host, sharing
from tests.exactness.modules import ALL_CASES, Case, make_epochs
from tests.exactness.setting import OPTIMIZERS, loss_of
from tests.exactness.several import SEVERAL
from tests.exactness.tied import TIED

WORLDS = ("lightning.pytorch", "pytorch_lightning")
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
SIZES = ((5, 5, 4, 2), (5, 5, 4, 2))


def delayed() -> list[Any]:
    """What a Trainer on one device needs to train as a pipeline does."""
    return [DelayedTeacherUpdate()]


@dataclass(frozen=True)
class Training:
    """What a Trainer gets.

    Attributes:
        case: Name in the exactness tests' ``ALL_CASES``, or of a module of theirs.
        strategy: Name of the strategy, ``instance`` for one made from ``options``.
        options: Arguments of ``TSPipeStrategy``.
        num_ranks: Devices.
        world: Which Lightning.
        optimizer: Name in ``OPTIMIZERS``.
        sizes: Batch sizes of each epoch.
        callbacks: Makes the callbacks; module-level.
        trainer: Further arguments of the Trainer.
        change: Changes the module after it is built; module-level.
    """

    case: str = "Byol-group-2-by hand"
    strategy: str = "tspipe"
    options: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    world: str = "lightning.pytorch"
    optimizer: str = "sgd"
    sizes: tuple[tuple[int, ...], ...] = SIZES
    callbacks: Callable[[], list[Any]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] | None = None


@dataclass
class Trained:
    """What a rank knows at the end."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    global_step: int
    meta: list[str]
    outputs: list[Any]


class Epochs:
    """A loader of given batches, other ones in each epoch."""

    def __init__(self, epochs: list[list[Any]]) -> None:
        self._epochs = epochs
        self._next = 0

    def __len__(self) -> int:
        return len(self._epochs[0])

    def __iter__(self) -> Iterator[Any]:
        batches = self._epochs[self._next % len(self._epochs)]
        self._next += 1
        yield from batches


class Unsized:
    """The same loader, without a length."""

    def __init__(self, epochs: list[list[Any]]) -> None:
        self._epochs = Epochs(epochs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._epochs)


class Recorder(Callback, OtherCallback):
    """Keeps what hooks see."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.outputs: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs and "loss" in outputs:  # a step by hand may return none
            self.losses.append(outputs["loss"].detach().clone())
        self.outputs.append(type(batch).__name__)


class _Steps:
    """Turns a module of the exactness tests into a LightningModule."""

    optimizer_name: str

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)  # type: ignore[misc]
        self.log("train_loss", loss_of(result).detach(), batch_size=1, prog_bar=True)  # type: ignore[attr-defined]
        return result

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](self.parameters())  # type: ignore[attr-defined]

    def on_train_batch_end(self, *_: Any) -> None:
        if hasattr(self, "after_step"):
            self.after_step()


def lightning_module(case: str, world: str, optimizer: str) -> Any:
    """A case of the exactness tests, as a module of one Lightning world."""
    others: dict[str, Any] = {**SEVERAL, **TIED}
    known = ALL_CASES[case] if case in ALL_CASES else Case(others[case], {})
    base: type[LightningModule] = importlib.import_module(world).LightningModule
    made = type(known.make.__name__, (_Steps, known.make, base), {"optimizer_name": optimizer})
    torch.manual_seed(0)
    return made(**known.kwargs)


def strategy_of(training: Training, module: Any) -> Any:
    """The Trainer's ``strategy``."""
    if training.strategy != "instance":
        return training.strategy
    names = {
        name: getattr(module, f"{name}_names", None) or None for name in ("student", "teacher")
    }
    # Nothing that a test looks at is measured, which takes long; a strategy by name measures.
    return TSPipeStrategy(**{"costs": "flops", **names, **training.options})


def quiet_trainer(world: str = "lightning.pytorch", **arguments: Any) -> Any:
    """A Trainer on CPUs that says and saves nothing unless asked to."""
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "log_every_n_steps": 1, "num_sanity_val_steps": 0,
        "accelerator": "cpu", "default_root_dir": ".",
    }  # fmt: skip
    return importlib.import_module(world).Trainer(**sharing({**quiet, **arguments}))


def trainer_of(training: Training, module: Any, *callbacks: Any) -> Any:
    """The Trainer of a training."""
    return quiet_trainer(
        training.world,
        **{
            "devices": training.num_ranks,
            "strategy": strategy_of(training, module),
            "max_epochs": len(training.sizes),
            "callbacks": [*training.callbacks(), *callbacks],
            **training.trainer,
        },
    )


def strict(*ignored: str) -> None:
    """Warnings are errors, as in pytest's own process.

    Args:
        ignored: Beginnings of further messages; they are right, and not what is tested.
    """
    logging.getLogger("lightning_tspipe").setLevel(logging.INFO)
    # Other versions and devices warn of other things.
    warnings.simplefilter("default" if SHARED in os.environ else "error")
    warnings.filterwarnings("error", category=UserWarning, module="lightning_tspipe")
    for message in (
        # Lightning 2.6 reads a deprecated class of torch's pytree, on every batch.
        r"`isinstance\(treespec, LeafSpec\)`",
        "The '\\w+_dataloader' does not have many workers",
        "The number of training batches",
        # A frozen teacher is.
        "Found .* in eval mode at the start of training",
        # Progress bars and loggers in a test's folder.
        ".*exists and is not empty",
        *ignored,
    ):
        warnings.filterwarnings("ignore", message=message)


RESUMING = "Be aware that when using `ckpt_path`"
"""What Lightning says of every other callback than those that were saved."""


def build_module(training: Training) -> Any:
    """The module."""
    module = lightning_module(training.case, training.world, training.optimizer)
    if training.change is not None:
        training.change(module)
    return module


def weights_of(module: Any) -> dict[str, Tensor]:
    """Copies of the parameters and buffers that are on this rank."""
    return {k: on_host(v).clone() for k, v in module.state_dict().items() if not v.is_meta}


def metrics_of(trainer: Any) -> dict[str, float]:
    """What this rank knows of what was logged."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Session:
    """A training on this rank: its module, loader and Trainer, to do with whatever is tested.

    Args:
        training: What is trained.
        callbacks: Beside those of the training.
        change: Changes the module that the training builds.
        module: Another module.
        ignored: As for :func:`strict`.
        trainer: Further arguments of the Trainer.
    """

    def __init__(
        self,
        training: Training,
        *callbacks: Any,
        change: Callable[[Any], Any] | None = None,
        module: Any = None,
        ignored: Sequence[str] = (),
        **trainer: Any,
    ) -> None:
        strict(*ignored)
        self.module = build_module(training) if module is None else module
        if change is not None:
            change(self.module)
        self.recorder = Recorder()
        self._training = training
        training = replace(training, trainer={**training.trainer, **trainer})
        self.trainer = trainer_of(training, self.module, self.recorder, *callbacks)

    @cached_property
    def loader(self) -> Epochs:
        """The batches of the training."""
        return Epochs(make_epochs(self.module, self._training.sizes))

    def fit(self, loader: Any = None, validation: Any = None, **arguments: Any) -> Self:
        """Train, on the training's own batches unless others are given."""
        if "ckpt_path" in arguments:
            arguments = {"weights_only": False, **arguments}
        if "datamodule" not in arguments:
            arguments["train_dataloaders"] = self.loader if loader is None else loader
            arguments["val_dataloaders"] = validation
        self.trainer.fit(self.module, **arguments)
        return self

    def validate(self, *loaders: Any) -> Any:
        """The metrics of a validation."""
        return self.trainer.validate(self.module, *loaders, verbose=False)

    def test(self, *loaders: Any) -> Any:
        """The metrics of a test."""
        return self.trainer.test(self.module, *loaders, verbose=False)

    def predict(self, *loaders: Any) -> Any:
        """The predictions."""
        return self.trainer.predict(self.module, *loaders)

    @property
    def trained(self) -> Trained:
        """What this rank has now."""
        state = self.module.state_dict()
        return Trained(
            on_host(self.recorder.losses),
            weights_of(self.module),
            metrics_of(self.trainer),
            self.trainer.global_step,
            [name for name, value in state.items() if value.is_meta],
            list(self.recorder.outputs),
        )


def train(training: Training) -> Trained:
    """Fit, and tell what this rank has then."""
    return Session(training).fit().trained


def train_unsized(training: Training) -> Trained:
    """The same with a loader that has no length."""
    it = Session(training)
    return it.fit(Unsized(make_epochs(it.module, training.sizes))).trained
