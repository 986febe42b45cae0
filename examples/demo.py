"""BYOL on handwritten digits over a pipeline of two CPU processes: ``python examples/demo.py``.

``BYOL`` is an ordinary LightningModule; ``strategy="tspipe"`` is all that is new. The same script
trains it on one device with ``--strategy auto --devices 1``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cosine_similarity, grid_sample
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

import lightning_tspipe  # noqa: F401 - registers strategy="tspipe"
from lightning_tspipe.callbacks import (
    KNNEvaluator,
    MomentumEMA,
    PipelineThroughputMonitor,
    PipelineTimeline,
    RunReport,
)
from lightning_tspipe.evaluation import knn_evaluation
from lightning_tspipe.simulation.timeline import Timeline

IMAGE_SIZE = 16
NUM_QUERIES = 360
Views = tuple[Tensor, Tensor]


class BYOL(LightningModule):
    """Bootstrap Your Own Latent (Grill et al., 2020), as one writes it for one device.

    Args:
        num_steps: Optimizer steps of the whole run, for the learning rate's cosine.
    """

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        backbone = ResNet(BasicBlock, [1, 1, 1, 1])
        backbone.conv1 = nn.Conv2d(1, 64, kernel_size=3, stride=2, padding=1, bias=False)
        backbone.maxpool = backbone.layer4 = backbone.fc = nn.Identity()
        projection = mlp(256, 256, 64).append(nn.BatchNorm1d(64))
        prediction = mlp(64, 256, 64)
        self.teacher = chain(backbone=deepcopy(backbone), projection=deepcopy(projection))
        self.student = chain(backbone=backbone, projection=projection, prediction=prediction)

    def training_step(self, batch: Views) -> Tensor:
        """BYOL's symmetric loss of two views, each (batch, 1, height, width)."""
        view0, view1 = batch
        prediction0, prediction1 = self.student(view0), self.student(view1)
        with torch.no_grad():
            target0, target1 = self.teacher(view0), self.teacher(view1)
        loss = distance(prediction0, target1) + distance(prediction1, target0)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(view0))
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with a warm-up and a cosine; the teacher follows by MomentumEMA."""
        learners: list[dict[str, Any]] = [
            {"params": self.student.get_submodule("backbone").parameters()},
            {"params": self.student.get_submodule("projection").parameters()},
            # A predictor that stays ahead of the rest learns much faster (Tian et al., 2021).
            {"params": self.student.get_submodule("prediction").parameters(), "lr": 1e-2},
        ]
        optimizer = torch.optim.AdamW(learners, lr=1e-3, weight_decay=1e-4)

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / 30) * (1 + math.cos(math.pi * step / self.num_steps)) / 2

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def chain(**modules: nn.Module) -> nn.Sequential:
    """The modules one after the other, under their names."""
    return nn.Sequential(OrderedDict(modules))


def mlp(num_inputs: int, num_hidden: int, num_outputs: int) -> nn.Sequential:
    """BYOL's heads: linear, BatchNorm, ReLU, linear."""
    return nn.Sequential(
        nn.Linear(num_inputs, num_hidden, bias=False),
        nn.BatchNorm1d(num_hidden),
        nn.ReLU(inplace=True),
        nn.Linear(num_hidden, num_outputs),
    )


def distance(prediction: Tensor, target: Tensor) -> Tensor:
    """One minus the mean cosine similarity: a scalar between 0 and 2."""
    return 1 - cosine_similarity(prediction, target, dim=1).mean()


def scribble(images: Tensor) -> Tensor:
    """Draw each image at a random place, angle, size and contrast, with noise.

    Args:
        images: (batch, 1, 8, 8), ink 1 on paper 0.

    Returns:
        (batch, 1, IMAGE_SIZE, IMAGE_SIZE).
    """
    num = len(images)
    angle = (2 * torch.rand(num) - 1) * math.radians(30)
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1)
    zoom = 1.1 + 0.3 * torch.rand(num, 1, 1)
    shift = 0.6 * torch.rand(num, 2, 1) - 0.3
    pose = torch.cat([rotation.view(num, 2, 2) * zoom, shift], dim=2)
    grid = affine_grid(pose, [num, 1, IMAGE_SIZE, IMAGE_SIZE], align_corners=False)
    contrast = 0.8 + 0.4 * torch.rand(num, 1, 1, 1)
    view = grid_sample(images, grid, align_corners=False) * contrast
    return view + 0.05 * torch.randn_like(view)


def two_views(samples: list[tuple[Tensor, Tensor]]) -> Views:
    """Collate (image, label) samples to a batch of two views; BYOL needs no labels."""
    images = torch.stack([image for image, _ in samples])
    return scribble(images), scribble(images)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1797 handwritten digits (8x8 pixels), split into bank and queries."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    queries, bank = order[:NUM_QUERIES], order[NUM_QUERIES:]
    return TensorDataset(images[bank], labels[bank]), TensorDataset(
        images[queries], labels[queries]
    )


def scribbled(dataset: TensorDataset) -> TensorDataset:
    """The same digits, each drawn once and for all."""
    images, labels = dataset.tensors
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TensorDataset(scribble(images), labels)


def accuracy(network: nn.Module, bank: TensorDataset, queries: TensorDataset) -> float:
    """k-NN accuracy of a network's features outside of any training."""
    return knn_evaluation(network, bank, queries, lambda _, images: network(images))["knn_top1"]


def column(log_dir: str, name: str) -> list[float]:
    """The values that the CSVLogger wrote for one metric, in order."""
    with (Path(log_dir) / "metrics.csv").open(encoding="utf-8") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def changed_stages(trainer: Trainer, before: dict[str, Tensor], after: nn.Module) -> list[int]:
    """The stages of the student whose weights are no longer the initial ones."""
    pipelined = getattr(trainer.strategy, "pipelined", None)
    parameters = dict(after.named_parameters())
    everything = [[name for name in parameters if name.startswith("student.")]]
    stages = getattr(pipelined, "student_stages", everything)
    return [
        stage
        for stage, names in enumerate(stages)
        if any(not torch.equal(before[name], parameters[name]) for name in names)
    ]


def main() -> None:
    """Train, and on rank 0 report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--strategy", default="tspipe", help="tspipe, tspipe_gpipe, ddp, auto, ...")
    parser.add_argument("--devices", type=int, default=2, help="number of pipeline stages")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # the devices are the cores; more threads would compete for them
    seed_everything(0, verbose=False)

    bank, queries = digits()
    loader = DataLoader(
        bank, options.batch_size, shuffle=True, drop_last=True, collate_fn=two_views
    )
    module = BYOL(num_steps=options.epochs * len(loader))
    initial = {name: value.detach().clone() for name, value in module.named_parameters()}
    fixed_bank, fixed_queries = scribbled(bank), scribbled(queries)
    untrained = accuracy(module.student, fixed_bank, fixed_queries)
    monitor = PipelineThroughputMonitor()
    trainer = Trainer(
        accelerator="cpu",
        strategy=options.strategy,
        devices=options.devices,
        max_epochs=options.epochs,
        logger=CSVLogger(options.output, name="logs"),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[
            MomentumEMA(momentum=(0.99, 1.0)),
            KNNEvaluator(fixed_bank, fixed_queries, every_n_epochs=5),
            monitor,
            PipelineTimeline(start_step=5, num_steps=3, path=options.output),
            page := RunReport(options.output),
        ],
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        summary = {
            **summarize(trainer, monitor),
            "val_knn_top1_untrained": untrained,
            "changed_stages": changed_stages(trainer, initial, module),
        }
        report(summary, options.output)
        print(f"Open in a browser: {page.file}")


def summarize(trainer: Trainer, monitor: PipelineThroughputMonitor) -> dict[str, object]:
    """The figures of the run, from the logger and the monitor."""
    speed = monitor.summary()
    logger = trainer.logger
    assert isinstance(logger, CSVLogger)
    losses = column(logger.log_dir, "loss_epoch")
    pipelined = getattr(trainer.strategy, "pipelined", None)
    return {
        "num_stages": 1 if pipelined is None else pipelined.num_stages,
        "images_per_second": speed["samples_per_second"],
        "bubble_ratio": getattr(pipelined, "bubble_ratio", 0.0),  # of the recorded steps
        "seconds": speed["elapsed"],
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "val_knn_top1": column(logger.log_dir, "val_knn_top1")[-1],
    }


def report(summary: dict[str, object], output: Path) -> None:
    """Write summary.json, and print it with the timeline."""
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console = Console()
    table = Table(title="BYOL on scikit-learn's digits", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in summary.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    console.print(table)
    drawing = output / "timeline.json"
    if drawing.exists():
        timeline = Timeline.from_json(drawing.read_text(encoding="utf-8"))
        console.print("F student forward, B I W backward, T teacher, t teacher of the next batch")
        console.print(timeline.draw(console.width - 10), markup=False, highlight=False)
    files = ", ".join(sorted(file.name for file in output.glob("*.*") if file.is_file()))
    console.print(f"Written to {output}: {files}")


if __name__ == "__main__":
    main()
