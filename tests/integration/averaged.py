"""Trainings that average a student which alone is trained, as functions that run on every rank."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe import MomentumEMA, TSPipeStrategy
from tests.integration.trainings import metrics_of, quiet_trainer, strict, weights_of

WIDTH, NUM_CLASSES = 6, 3


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        num_ranks: Devices; with 1 there is no pipeline.
        options: Arguments of ``TSPipeStrategy``.
        buffers: Of ``MomentumEMA``; None: the step averages the parameters itself.
        name: Of the average.
        builds_late: Whether the module is built by ``configure_model``.
        parts: Whether a callback for each of its layers averages it.
    """

    num_ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    buffers: Any = "average"
    name: str = "average"
    builds_late: bool = False
    parts: bool = False


@dataclass
class Found:
    """What a rank knows at the end."""

    weights: dict[str, Tensor]
    metrics: dict[str, float]


class Averaged(LightningModule):
    """A classifier, of which the average is validated beside it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        if not case.builds_late:
            self._build()

    def configure_model(self) -> None:
        if not hasattr(self, "student"):
            self._build()

    def _build(self) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
            for _ in range(3)
        ]
        self.student = nn.Sequential(*blocks, nn.Linear(WIDTH, NUM_CLASSES))
        self.add_module(self._case.name, deepcopy(self.student).requires_grad_(False))

    @property
    def _average(self) -> nn.Module:
        return self.get_submodule(self._case.name)

    @torch.no_grad()
    def _update(self) -> None:
        for copy, original in zip(
            self._average.parameters(), self.student.parameters(), strict=True
        ):
            copy.data = copy.data * 0.9 + original.data * 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self._case.buffers is None:
            self._update()
        return F.cross_entropy(self.student(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("of_average", F.cross_entropy(self._average(x), y))
        self.log("of_student", F.cross_entropy(self.student(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), 0.1, momentum=0.9)


class Apart(Averaged):
    """The first loader is for the average, the second one for the student."""

    def validation_step(  # type: ignore[override]
        self, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        x, y = batch
        network = self.student if dataloader_idx else self._average
        self.log("loss", F.cross_entropy(network(x), y))


def validate_apart(case: Case) -> dict[str, float]:
    """Validate without a training."""
    strict()
    strategy: Any = "auto" if case.num_ranks == 1 else TSPipeStrategy(**case.options)
    averages = [MomentumEMA(0.9, teacher=case.name)]
    trainer = quiet_trainer(devices=case.num_ranks, strategy=strategy, callbacks=averages)
    found = trainer.validate(Apart(case), [_loader(), _loader()], verbose=False)
    return {name: float(value) for part in found for name, value in part.items()}


def _loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(NUM_CLASSES, (20,), generator=generator)), 8)


def train(case: Case) -> Found:
    """Fit, validate, and tell what this rank has then."""
    strict()
    module = Averaged(case)
    strategy: Any = "auto" if case.num_ranks == 1 else TSPipeStrategy(**case.options)
    averages: list[Any] = []
    if case.parts:
        averages += [
            MomentumEMA(0.9, f"student.{n}", f"{case.name}.{n}", case.buffers) for n in range(4)
        ]
    elif case.buffers is not None:
        averages.append(MomentumEMA(0.9, teacher=case.name, buffers=case.buffers))
    trainer = quiet_trainer(
        devices=case.num_ranks, strategy=strategy, max_epochs=2, callbacks=averages
    )
    loader = _loader()
    trainer.fit(module, loader, loader)
    state = weights_of(module)
    fitted = {f"fit: {name}": value for name, value in metrics_of(trainer).items()}
    trainer.validate(module, loader, verbose=False)
    return Found(state, fitted | metrics_of(trainer))
