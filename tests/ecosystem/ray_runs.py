"""Trainings on a local Ray cluster of two workers; a command that works in a folder of its own.

``python tests/ecosystem/ray_runs.py compared`` and ``... retried`` write the losses of each run to
``NAME.jsonl``.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning
import ray
import ray.train
import torch
from lightning.pytorch import seed_everything
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe import DelayedTeacherUpdate, MomentumEMA
from lightning_tspipe.integrations.ray import RayTSPipeStrategy, prepare_trainer

EPOCHS, STEPS = 3, 4
WORLDS = ("lightning.pytorch", "pytorch_lightning")


class Steps:
    """A student that learns to do as a teacher, its average, does on another view."""

    def build(self) -> None:
        """Make the networks."""
        self.student, self.teacher = (
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
            for _ in range(2)
        )
        self.teacher.load_state_dict(self.student.state_dict())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The distance of the two."""
        loss = mse_loss(self.student(batch[0]), self.teacher(batch[1]).roll(1, 0))
        self.log("loss", loss)  # type: ignore[attr-defined]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With momentum, which a checkpoint has to keep."""
        return torch.optim.SGD(self.student.parameters(), lr=0.1, momentum=0.9)


class Module(Steps, lightning.pytorch.LightningModule):
    """Of one Lightning."""


class OtherModule(Steps, pytorch_lightning.LightningModule):
    """Of the other one."""


class Told(lightning.pytorch.Callback, pytorch_lightning.Callback):
    """Writes each step's loss at once, since a worker may be killed.

    Args:
        file: Where to.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        """Write it, on the rank that has it."""
        if trainer.is_global_zero:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([trainer.global_step, float(outputs["loss"])]) + "\n")


class Failing(lightning.pytorch.Callback):
    """Has rank 1 raise in the middle of the second epoch, and rank 0 die in that of the third.

    Args:
        folder: Where they note it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Fail, if it is time."""
        rank, note = trainer.global_rank, self.folder / f"failed-{trainer.global_rank}"
        is_time = (trainer.global_step, rank) in {(STEPS + 2, 1), (2 * STEPS + 2, 0)}
        if is_time and not note.exists():  # once
            note.touch()
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("made to fail")


def fit(
    file: Path, strategy: Any, *callbacks: Any, world: str = WORLDS[0],
    checkpoint: Any = None, **arguments: Any,
) -> Any:  # fmt: skip
    """Fit in this process, alone or as one of several; its Trainer."""
    torch.set_default_dtype(torch.float64)
    seed_everything(0, verbose=False)
    module = Module() if world == WORLDS[0] else OtherModule()
    module.build()
    trainer = importlib.import_module(world).Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=EPOCHS, default_root_dir=str(file.parent),
        callbacks=[MomentumEMA(), Told(file), *callbacks], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **arguments,
    )  # fmt: skip
    data = TensorDataset(*torch.randn(2, 5 * STEPS, 8))
    with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
        path = folder and str(Path(folder, RayTrainReportCallback.CHECKPOINT_NAME))
        prepared = prepare_trainer(trainer) if isinstance(strategy, RayTSPipeStrategy) else trainer
        prepared.fit(module, DataLoader(data, batch_size=5, shuffle=True), ckpt_path=path)
    return trainer


def in_both_worlds(config: dict[str, str]) -> None:
    """A worker: a fit, and one by the other Lightning, which takes no such plugin; both report."""
    folder = Path(config["folder"])
    fit(
        folder / "ray.jsonl", RayTSPipeStrategy(), RayTrainReportCallback(),
        plugins=[RayLightningEnvironment()],
    )  # fmt: skip
    strategy = RayTSPipeStrategy(cluster_environment=RayLightningEnvironment())
    fit(folder / "other.jsonl", strategy, RayTrainReportCallback(), world=WORLDS[1])


def failing(config: dict[str, str]) -> None:
    """A worker that fails, or goes on where one has."""
    folder = Path(config["folder"])
    fit(
        folder / "ray.jsonl", RayTSPipeStrategy(), Failing(folder), RayTrainReportCallback(),
        plugins=[RayLightningEnvironment()], checkpoint=ray.train.get_checkpoint(),
    )  # fmt: skip


def on_ray(function: Callable[[dict[str, str]], None], folder: Path) -> ray.train.Result:
    """Run a function in two workers, which Ray starts again after failures."""
    trainer = TorchTrainer(
        function,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=2),
        ),
    )  # fmt: skip
    return trainer.fit()


def main(name: str) -> None:
    """Run the same on one device, and on Ray."""
    folder = Path.cwd()
    fit(folder / "alone.jsonl", "auto", DelayedTeacherUpdate(), devices=1)
    # Short, for the sockets in it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=short)
        try:
            result = on_ray({"compared": in_both_worlds, "retried": failing}[name], folder)
        finally:
            ray.shutdown()
    print(json.dumps({"metrics": result.metrics, "checkpoint": str(result.checkpoint.path)}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
