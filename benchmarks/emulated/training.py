"""What each process of an emulated run does: an ordinary Trainer, strategy and LightningModule."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from benchmarks.crews.gate import Gate, GatedLoader
from benchmarks.crews.job import Job
from benchmarks.emulated.sleeping import SleepingAtom
from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.planning.step_profile import StepProfile

NUM_BATCHES = 4


def train(job: Job, connection: Connection) -> None:
    """Run one rank, for as long as the coordinator hands out tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate = Gate(connection)
    gate.listen()
    options = dict(job.options)
    folder = Path(str(options["folder"]))
    profile = StepProfile.from_json((folder / "profile.json").read_text(encoding="utf-8"))
    module = Emulated(profile)
    views = tuple(torch.zeros(job.batch_size, 1) for _ in range(profile.num_calls[0]))
    trainer = Trainer(
        accelerator="cpu",
        strategy=TSPipeStrategy(plan=folder / f"{job.method}.json"),
        devices=job.num_ranks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, GatedLoader(gate, [views] * NUM_BATCHES))


class Emulated(LightningModule):
    """A teacher and a student that sleep.

    Args:
        profile: What they cost, in emulated seconds and bytes.
    """

    def __init__(self, profile: StepProfile) -> None:
        super().__init__()
        assert profile.teacher is not None
        self._is_paired = profile.paired
        self.student = _network(profile.student, 1)
        # Weights of another length keep a teacher that has no pair from being taken for one.
        num_weights = 1 if profile.paired else 2
        self.teacher = _network(profile.teacher, num_weights)
        self.teacher.requires_grad_(requires_grad=False)

    @override
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        if self._is_paired:
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=False)
            for mean, weight in pairs:
                mean.data = mean.data * 0.99 + weight.data * 0.01
        predictions = [self.student(view) for view in batch]
        with torch.no_grad():
            targets = [self.teacher(view) for view in batch]
        sums = [p.mean() + t.mean() for p, t in zip(predictions, targets, strict=True)]
        return torch.stack(sums).sum()

    @override
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.student.parameters(), lr=0.01)


def _network(profile: NetworkProfile, num_weights: int) -> nn.Sequential:
    return nn.Sequential(*(SleepingAtom(atom, num_weights) for atom in profile.atoms))
