"""Trainings under Lightning's ``WeightAveraging``, as functions that run on every rank."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from lightning_tspipe import TSPipeStrategy
from tests.exactness.fanout import Loader, Tasks, make_batches
from tests.integration.relayed import Relay, batches, relay_trainer
from tests.integration.trainings import (
    RESUMING,
    Epochs,
    Session,
    Training,
    metrics_of,
    quiet_trainer,
    strict,
    weights_of,
)


@dataclass(frozen=True)
class Averaging:
    """What averages the weights of a training.

    Attributes:
        name: Of Lightning's callback.
        arguments: Of the callback.
    """

    name: str = "EMAWeightAveraging"
    arguments: dict[str, Any] = field(default_factory=lambda: {"decay": 0.5})

    def make(self, world: str) -> Any:
        kind = getattr(importlib.import_module(f"{world}.callbacks"), self.name)
        return kind(**self.arguments)


@dataclass
class Found:
    """What a rank knows at the end of a fit.

    Attributes:
        losses: Of the steps.
        weights: Those of the module.
        metrics: Of each validation with averaged weights.
        saved: By the name of a checkpoint: the averages, the trained weights, and the number.
        missing: Tensors of the average that were elsewhere while it was trained.
    """

    losses: list[Tensor]
    weights: dict[str, Tensor]
    metrics: list[dict[str, float]]
    saved: dict[str, Any]
    missing: int


class Watch:
    """Keeps the metrics of each validation, and counts what of the average is elsewhere.

    Args:
        world: Which Lightning.
        average: The callback.
    """

    def __init__(self, world: str, average: Any) -> None:
        self.metrics: list[dict[str, float]] = []
        self.missing = 0
        self._average = average
        self.callback = importlib.import_module(f"{world}.callbacks").LambdaCallback(
            on_train_batch_end=self._count, on_validation_end=self._keep
        )

    def _count(self, *_: Any) -> None:
        self.missing = len(elsewhere(self._average))

    def _keep(self, trainer: Any, _module: Any) -> None:
        self.metrics.append(metrics_of(trainer))


def elsewhere(average: Any) -> list[Tensor]:
    """What of an average this rank does not hold."""
    copy = average._average_model.module
    return [each for each in [*copy.parameters(), *copy.buffers()] if each.is_meta]


def validates(module: Any) -> None:
    """Have a validation look at what a student returns."""

    def validation_step(batch: Any, batch_idx: int) -> None:
        student = module.get_submodule(module.student_names[0])
        outputs = student(batch["views"][0] if isinstance(batch, dict) else batch[0])
        module.log("val", outputs.square().mean(), batch_size=1, sync_dist=True)

    module.validation_step = validation_step


def held_out(session: Session) -> Epochs:
    """Batches to validate with."""
    module = session.module
    return Epochs([[module.batch(size, 900 + size) for size in (4, 3)]])


def prepared(training: Training, by: Averaging, **trainer: Any) -> tuple[Session, Any, Watch]:
    """A session that averages, the callback, and what watches it."""
    average = by.make(training.world)
    watch = Watch(training.world, average)
    session = Session(
        training, average, watch.callback, change=validates,
        ignored=[RESUMING, "The dirpath has changed"], **trainer,
    )  # fmt: skip
    return session, average, watch


def found_by(session: Session, watch: Watch) -> Found:
    """What this rank has after a fit."""
    session.trainer.save_checkpoint("after.ckpt")
    saved = {}
    if session.trainer.is_global_zero:
        saved = {path.stem: _saved(path) for path in sorted(Path().rglob("*.ckpt"))}
    losses, weights = session.recorder.losses, weights_of(session.module)
    return Found(losses, weights, watch.metrics, saved, watch.missing)


def _saved(path: Path) -> dict[str, Any]:
    found = torch.load(path, weights_only=False)
    return {name: found[name] for name in ("state_dict", "current_model_state", "averaging_state")}


def fit(training: Training, by: Averaging, ckpt_path: str | None = None) -> Found:
    """Train, validate and save, with an average."""
    session, _, watch = prepared(training, by)
    given = {} if ckpt_path is None else {"ckpt_path": ckpt_path}
    session.fit(validation=held_out(session), **given)
    return found_by(session, watch)


def fit_checked(training: Training, by: Averaging, seeds: Sequence[int]) -> Found:
    """Fit with a sanity check, from weights that each rank has drawn for itself."""
    session, _, watch = prepared(training, by, num_sanity_val_steps=1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    generator = torch.Generator().manual_seed(seeds[rank])
    with torch.no_grad():
        for parameter in session.module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    session.fit(validation=held_out(session))
    return found_by(session, watch)


def fit_twice(training: Training, by: Averaging) -> tuple[Found, list[Any]]:
    """Fit, validate apart, fit on with the same Trainer, and load what was saved first."""
    session, _, watch = prepared(training, by)
    session.fit(validation=held_out(session))
    session.trainer.save_checkpoint("first.ckpt")
    apart = [session.validate(held_out(session))]
    session.trainer.fit_loop.max_epochs = 2 * len(training.sizes)
    session.fit(validation=held_out(session))
    apart.append(session.validate(held_out(session)))
    return found_by(session, watch), apart


def fit_to(training: Training, by: Averaging, epochs: int) -> Found:
    """Train for some epochs only."""
    return fit(replace(training, trainer={**training.trainer, "max_epochs": epochs}), by)


def fit_with_found_rate(training: Training, by: Averaging) -> tuple[Found, float]:
    """Find a learning rate first, in a fit of its own, and go back."""
    session, _, watch = prepared(training, by)
    module = session.module
    module.lr = 1e-3
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=module.lr)
    session.fit(validation=held_out(session))
    return found_by(session, watch), module.lr


def fit_blocks(num_ranks: int, mode: str) -> tuple[dict[str, Tensor], dict[str, float], Any]:
    """Distil blocks that are relayed, on several devices or on one."""
    strict("The number of blocks")
    relay = Relay(num_ranks=num_ranks, options={"mode": mode})
    average = EMAWeightAveraging(decay=0.9)
    trainer, module = relay_trainer(relay, average), relay.build()
    trainer.fit(module, Epochs(relay.epochs()), Epochs([batches((4, 3), seed=9)]))
    return _ended(trainer, module)


def fit_heads(num_ranks: int) -> tuple[dict[str, Tensor], dict[str, float], Any]:
    """Train heads on a frozen trunk, on several devices or on one."""
    warnings.filterwarnings("ignore")
    trainer: Any = quiet_trainer(
        strategy=TSPipeStrategy(partition=[4, 6]) if num_ranks > 1 else "auto", devices=num_ranks,
        max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.9)],
        val_check_interval=2,
    )  # fmt: skip
    module = Tasks(3)
    trainer.fit(module, Loader(make_batches((5, 5, 5, 3))), Loader(make_batches((4, 2))))
    return _ended(trainer, module)


def _ended(trainer: Any, module: Any) -> tuple[dict[str, Tensor], dict[str, float], Any]:
    trainer.save_checkpoint("after.ckpt")
    saved = _saved(Path("after.ckpt")) if trainer.is_global_zero else {}
    return weights_of(module), metrics_of(trainer), saved
