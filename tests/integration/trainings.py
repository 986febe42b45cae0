"""Trainings by a real Trainer, as functions that run on every rank of a job."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from pytorch_lightning import Callback as OtherCallback
from torch import Tensor

from lightning_tspipe import DelayedTeacherUpdate, TSPipeStrategy
from tests.exactness.modules import ALL_CASES, make_epochs
from tests.exactness.setting import OPTIMIZERS, loss_of

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
        case: Name in the exactness tests' ``ALL_CASES``.
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
    known = ALL_CASES[case]
    base: type[LightningModule] = importlib.import_module(world).LightningModule
    made = type(known.make.__name__, (_Steps, known.make, base), {"optimizer_name": optimizer})
    torch.manual_seed(0)
    return made(**known.kwargs)


def strategy_of(training: Training, module: Any) -> Any:
    """The Trainer's ``strategy``."""
    if training.strategy != "instance":
        return training.strategy
    names = {"student": module.student_names, "teacher": module.teacher_names or None}
    return TSPipeStrategy(**{**names, **training.options})


def trainer_of(training: Training, module: Any, *callbacks: Any) -> Any:
    """The Trainer; quiet unless asked otherwise."""
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "log_every_n_steps": 1, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return importlib.import_module(training.world).Trainer(
        **{
            **quiet,
            "accelerator": "cpu",
            "devices": training.num_ranks,
            "strategy": strategy_of(training, module),
            "max_epochs": len(training.sizes),
            "default_root_dir": ".",
            "callbacks": [*training.callbacks(), *callbacks],
            **training.trainer,
        }
    )


def strict() -> None:
    """Warnings are errors, as in pytest's own process."""
    logging.getLogger("lightning_tspipe").setLevel(logging.INFO)
    warnings.simplefilter("error")
    # Lightning 2.6 reads a deprecated class of torch's pytree, on every batch.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")
    warnings.filterwarnings("ignore", message="The '\\w+_dataloader' does not have many workers")
    warnings.filterwarnings("ignore", message="The number of training batches")
    # A frozen teacher is.
    warnings.filterwarnings("ignore", message="Found .* in eval mode at the start of training")
    # Progress bars and loggers in a test's folder.
    warnings.filterwarnings("ignore", message=".*exists and is not empty")


def build(training: Training) -> tuple[Any, Any]:
    """The module and its loader."""
    module = lightning_module(training.case, training.world, training.optimizer)
    if training.change is not None:
        training.change(module)
    return module, Epochs(make_epochs(module, training.sizes))


def train(training: Training) -> Trained:
    """Fit, and tell what this rank has then."""
    strict()
    module, loader = build(training)
    recorder = Recorder()
    trainer = trainer_of(training, module, recorder)
    trainer.fit(module, loader)
    return report(trainer, module, recorder)


def train_unsized(training: Training) -> Trained:
    """The same with a loader that has no length."""
    strict()
    module, _ = build(training)
    recorder = Recorder()
    trainer = trainer_of(training, module, recorder)
    trainer.fit(module, Unsized(make_epochs(module, training.sizes)))
    return report(trainer, module, recorder)


def report(trainer: Any, module: Any, recorder: Recorder) -> Trained:
    """What a rank has after a fit."""
    state = module.state_dict()
    return Trained(
        recorder.losses,
        {k: v.detach().clone() for k, v in state.items() if not v.is_meta},
        {k: float(v) for k, v in trainer.callback_metrics.items()},
        trainer.global_step,
        [k for k, v in state.items() if v.is_meta],
        recorder.outputs,
    )
