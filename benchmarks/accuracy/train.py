"""One run: ``python benchmarks/accuracy/train.py byol tspipe 0 --images DIR --runs DIR``."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.accuracy.data import TwoViews, images, plain, sentences
from benchmarks.accuracy.late import LateGradients
from benchmarks.accuracy.tasks import ARMS, NETWORKS, TASKS, Classification, Distillation, Task
from lightning_tspipe import KNNEvaluator, MomentumEMA, TSPipeStrategy

NUM_QUERIES = 1000
TEACHER_EPOCHS = 3


class Data(LightningDataModule):
    """The same batches in the same order in every arm."""

    def __init__(
        self, train: Dataset[Any], test: Dataset[Any] | None, size: int, seed: int
    ) -> None:
        super().__init__()
        self._train, self._test, self._size, self._seed = train, test, size, seed

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self._seed)
        return DataLoader(self._train, self._size, shuffle=True, drop_last=True, generator=order)

    @override
    def val_dataloader(self) -> Any:
        return DataLoader(self._test, 100) if self._test is not None else []


def main() -> None:
    """Train, and on rank 0 write the result."""
    options = _parse()
    torch.set_num_threads(1)  # one device is one core, in every arm
    task: Task = TASKS[options.task]
    seed_everything(options.seed, verbose=False)
    module, data, callbacks = (
        _distillation(task, options) if options.task == "kd" else _self_supervised(task, options)
    )
    with TemporaryDirectory(prefix="accuracy-") as folder:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=task.epochs,
            logger=CSVLogger(folder, name="", version=""),
            log_every_n_steps=1,
            callbacks=callbacks,
            precision="64-true" if options.task == "kd" else "32-true",
            enable_checkpointing=False,
            enable_progress_bar=sys.stderr.isatty(),
            enable_model_summary=False,
            **_arm(options.arm, callbacks),
        )
        trainer.fit(module, data)
        if trainer.is_global_zero:
            _write(options, task, module, Path(folder) / "metrics.csv")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--images", type=Path, help="with train/ and test/, a folder per class")
    parser.add_argument("--sentences", type=Path, help="with train.tsv and dev.tsv")
    parser.add_argument("--runs", type=Path, required=True, help="where the result goes")
    return parser.parse_args()


def _arm(name: str, callbacks: list[Callback]) -> dict[str, Any]:
    if name == "tspipe":
        # One micro-batch, as on one device: BatchNorm normalises over the same images.
        return {"strategy": TSPipeStrategy(num_microbatches=1), "devices": 2}
    if name == "late_gradients":
        callbacks.append(LateGradients())
    return {"strategy": "auto", "devices": 1}


def _self_supervised(
    task: Task, options: argparse.Namespace
) -> tuple[LightningModule, LightningDataModule, list[Callback]]:
    pictures, labels = images(options.images / "train", task.num_samples)
    queries = plain(*images(options.images / "test", NUM_QUERIES))
    callbacks: list[Callback] = [
        MomentumEMA(momentum=(0.99, 1.0)),
        KNNEvaluator(plain(pictures, labels), queries, "student.backbone", every_n_epochs=3),
    ]
    data = Data(TwoViews(pictures, options.seed), None, task.batch_size, options.seed)
    return NETWORKS[options.task](task.num_steps), data, callbacks


def _distillation(
    task: Task, options: argparse.Namespace
) -> tuple[LightningModule, LightningDataModule, list[Callback]]:
    train, test = sentences(options.sentences, task.num_samples)
    data = Data(train, test, task.batch_size, options.seed)
    teacher = Classification()
    # Every rank trains the same one: the module must be the same everywhere.
    Trainer(
        accelerator="cpu", devices=1, max_epochs=TEACHER_EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        precision="64-true",
    ).fit(teacher, data)  # fmt: skip
    seed_everything(options.seed, verbose=False)
    return Distillation(teacher.network), data, []


def _write(options: argparse.Namespace, task: Task, module: LightningModule, metrics: Path) -> None:
    with metrics.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    curves = {
        name: [[int(row["step"]) + 1, float(row[name])] for row in rows if row.get(name)]
        for name in ("loss", task.metric)
    }
    name = f"{options.task}-{options.arm}-{options.seed}"
    options.runs.mkdir(parents=True, exist_ok=True)
    torch.save(module.get_submodule("student").state_dict(), options.runs / f"{name}.pt")
    result = {"setting": asdict(task), "curves": curves}
    (options.runs / f"{name}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
