"""What one process of the memory measurement does: trains, and reads what the system says."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torchvision.models import resnet50
from typing_extensions import override

from benchmarks.crews.gate import Gate, GatedLoader
from benchmarks.crews.job import Job
from lightning_tspipe import TSPipeStrategy

IMAGE_SIZE, NUM_CLASSES = 96, 1000
ATOMS = (17, 13, 13, 15)
"""Of each stage; what the planner chooses for four devices and images of 224 pixels."""
FIRST_STEP, LAST_STEP = 8, 11
"""Those that are looked at: four batches with the pipeline full, and with 2BW one update."""


def train(job: Job, connection: Connection) -> None:
    """Run one process, for as long as the coordinator hands out tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate = Gate(connection)
    gate.listen()
    options: dict[str, Any] = dict(job.options)
    callback = Resident(gate)
    module = Classifier()
    batch = (
        torch.randn(job.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE),
        torch.randint(NUM_CLASSES, (job.batch_size,)),
    )
    trainer = Trainer(
        accelerator="cpu", devices=job.num_ranks, max_epochs=1, logger=False,
        strategy=TSPipeStrategy(partition=list(ATOMS), **options),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=job.num_ranks if options["weights"] == "2bw" else 1,
        callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module, GatedLoader(gate, [batch]))


class Classifier(LightningModule):
    """ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        self.student = resnet50(num_classes=NUM_CLASSES)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self.student(images), labels)

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.01, momentum=0.9)


class Resident(Callback):
    """Tells the coordinator by how much the process has grown at most.

    Made before the module, so that all of the training counts.

    Args:
        gate: Gets to know it.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._before = _resident("VmRSS")

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST_STEP:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # a new high-water mark

    @override
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == LAST_STEP:
            self._gate.notes["resident"] = _resident("VmHWM") - self._before


def _resident(name: str) -> int:
    """Bytes of this process that are in memory now (VmRSS), or were at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
