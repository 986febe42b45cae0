"""The same training by a strategy of this package.

python -m benchmarks.schedules.our_side zbv linear size seconds.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.schedules.emulation import Clock
from benchmarks.schedules.stages import WINDOW, batches, stages
from benchmarks.schedules.torch_side import WINDOWS


class Trains(LightningModule):
    """A student of stages."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.student = nn.Sequential(*stages(kind, number))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.student(batch)
        target = batch if output.shape == batch.shape else 0
        loss: Tensor = (output - target).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=1e-3)


def main() -> None:
    """Train, and write the seconds of each window but the first."""
    name, kind, size, file = sys.argv[1:]
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        strategy=f"tspipe_{name}",
        devices=int(size),
        accumulate_grad_batches=WINDOW,
        callbacks=[Clock(WINDOW, Path(file))],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    number = int(size) if name == "1f1b" else 2 * int(size)
    data: Any = batches() * WINDOWS
    trainer.fit(Trains(kind, number), DataLoader(data, batch_size=None))


if __name__ == "__main__":
    main()
