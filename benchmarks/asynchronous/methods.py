"""What one process of a method does: an ordinary Trainer, strategy and LightningModule."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torchvision.models import resnet18
from typing_extensions import override

from benchmarks.asynchronous.entries import SYNCHRONOUS, WINDOWS
from benchmarks.crews.gate import Gate, GatedLoader
from benchmarks.crews.job import Job
from benchmarks.crews.messages import Bytes
from benchmarks.emulated.sleeping import SleepingStage
from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.simulation.cost import StageCost

IMAGE_SIZE, NUM_CLASSES, NUM_BATCHES = 64, 100, 4
STAGE_SECONDS = 0.15
"""What an emulated stage needs for a whole batch, there and back; the way back takes two thirds."""
OUTPUT_BYTES = 100_000


def train(job: Job, connection: Connection) -> None:
    """Run one process, for as long as the coordinator hands out tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate = Gate(connection)
    gate.listen()
    emulated = job.workload == "emulated"
    module = Emulated(job.num_ranks, job.num_microbatches) if emulated else Classifier()
    strategy: str | Strategy = "ddp"
    if job.method != "ddp":
        options: dict[str, Any] = dict(job.options)
        if emulated:
            options["partition"] = {"student": [1] * job.num_ranks}
        strategy = TSPipeStrategy(**options)
    size = job.batch_size // job.num_ranks if job.method == "ddp" else job.batch_size
    batches = [module.batch(size) for _ in range(NUM_BATCHES)]
    windows = {"2bw": job.num_ranks, SYNCHRONOUS: WINDOWS[job.workload]}
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=job.num_ranks, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=windows.get(str(dict(job.options).get("weights")), 1),
        callbacks=[CountVersions(gate)],
    )  # fmt: skip
    trainer.fit(module, GatedLoader(gate, batches))


class CountVersions(Callback):
    """Tells the coordinator the bytes of all versions of this rank's weights, and of gradients."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        weights = None if engine is None else engine.weights
        trained = trainer.lightning_module.parameters()
        one = sum(parameter.nbytes for parameter in trained if not parameter.is_meta)
        versions = 1 if weights is None else weights.most_versions
        self._gate.held = Bytes(student=versions * one, gradients=one, optimizer=0, fixed=0)


class Classifier(LightningModule):
    """ResNet-18 on images of 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.student = resnet18(num_classes=NUM_CLASSES)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self.student(images), labels)

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    @staticmethod
    def batch(size: int) -> tuple[Tensor, ...]:
        """Images that nobody has seen."""
        return torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE), torch.randint(NUM_CLASSES, (size,))


class Emulated(LightningModule):
    """Stages that sleep as long as equal parts of a network would compute.

    Args:
        num_stages: How many.
        num_microbatches: Each takes its part of the time.
    """

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        super().__init__()
        share = STAGE_SECONDS / num_microbatches / 3
        cost = StageCost(
            forward=share, backward=2 * share, input_backward=share, weight_backward=share,
            output_bytes=OUTPUT_BYTES // num_microbatches,
        )  # fmt: skip
        self.student = nn.Sequential(*(SleepingStage(cost, 1) for _ in range(num_stages)))

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.student(batch[0]).mean()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.01, momentum=0.9)

    @staticmethod
    def batch(size: int) -> tuple[Tensor, ...]:
        """Nothing but a size."""
        return (torch.zeros(size, 1),)
