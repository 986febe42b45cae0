"""One run: ``python benchmarks/asynchronous/train.py resnet pipeoptim 0 --data DIR --runs DIR``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.accuracy.data import images, plain, sentences
from benchmarks.asynchronous.tasks import NUM_STAGES, TASKS, Classifier, Task, flipped
from lightning_tspipe import TSPipeStrategy

NUM_TEST_IMAGES = 2000


@dataclass
class Augmented:
    """Batches of a loader; images are mirrored and moved, the same in every arm.

    Attributes:
        loader: Gives images and labels.
        generator: Of the changes.
    """

    loader: DataLoader[Any]
    generator: torch.Generator

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, labels in self.loader:
            yield flipped(inputs, self.generator) if inputs.dim() == 4 else inputs, labels


class Curve(Callback):
    """The accuracy after each epoch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: object) -> None:
        if not trainer.sanity_checking and trainer.is_global_zero:
            self.values.append(float(trainer.callback_metrics["val_accuracy"]))


def main() -> None:
    """Train, and on rank 0 write the result."""
    options = _parse()
    torch.set_num_threads(1)
    task = TASKS[options.task]
    task = replace(
        task, num_samples=options.samples or task.num_samples, epochs=options.epochs or task.epochs
    )
    seed_everything(options.seed, verbose=False)
    train, test = _data(task, options.data)
    # 2BW needs as many batches per update as stages: they are smaller by as much.
    parts = NUM_STAGES if options.arm == "2bw" else 1
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(
        train, task.batch_size // parts, shuffle=True, drop_last=True, generator=order
    )
    batches = Augmented(loader, torch.Generator().manual_seed(options.seed))
    curve = Curve()
    trainer = Trainer(
        accelerator="cpu", max_epochs=task.epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        accumulate_grad_batches=parts, callbacks=[curve], **_arm(options.arm),
    )  # fmt: skip
    module = Classifier(task, task.epochs * (len(loader) // parts))
    trainer.fit(module, batches, DataLoader(test, 100))
    if trainer.is_global_zero:
        name = f"{options.task}-{options.arm}-{options.seed}.json"
        options.runs.mkdir(parents=True, exist_ok=True)
        setting = {"samples": task.num_samples, "epochs": task.epochs}
        result = {"setting": setting, "accuracy": curve.values}
        (options.runs / name).write_text(json.dumps(result) + "\n", encoding="utf-8")


def _arm(name: str) -> dict[str, Any]:
    if name == "gpipe1":
        # GPipe with one micro-batch is what one device trains; tests compare the two in float64.
        return {"strategy": "auto", "devices": 1}
    strategy = TSPipeStrategy(schedule="1f1b", weights=name)
    return {"strategy": strategy, "devices": NUM_STAGES}


def _data(task: Task, folder: Path) -> tuple[Any, Any]:
    if task.data == "sentences":
        return sentences(folder, task.num_samples)
    train = plain(*images(folder / "train", task.num_samples))
    return train, plain(*images(folder / "test", NUM_TEST_IMAGES))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("arm")
    parser.add_argument("seed", type=int)
    parser.add_argument("--data", type=Path, required=True, help="images or sentences")
    parser.add_argument("--runs", type=Path, required=True, help="where the result goes")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--epochs", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
