from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(num_threads)


def network(*, batch_norm: bool) -> nn.Sequential:
    middle: nn.Module = nn.BatchNorm1d(5) if batch_norm else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 5), middle, nn.Linear(5, 3)).double()


class Pair(LightningModule):
    """Student with a predictor, teacher without; the loss pulls one to the other."""

    def __init__(
        self,
        *,
        batch_norm: bool = False,
        after_student: Callable[[Pair], None] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        encoder = network(batch_norm=batch_norm)
        self.student = nn.Sequential(*encoder, nn.Linear(3, 3).double())
        self.teacher = deepcopy(encoder)
        self.after_student = after_student
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        prediction = self.student(batch)
        if self.after_student is not None:
            self.after_student(self)
        with torch.no_grad():
            target = self.teacher(batch)
        loss: Tensor = (prediction - 1 - target).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.3, momentum=0.9)


class Batches:
    """A loader of fixed batches that knows where it is, so that a run can resume within it."""

    def __init__(self, num_batches: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.batches = [
            torch.randn(6, 4, dtype=torch.float64, generator=generator) for _ in range(num_batches)
        ]
        self.start = self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.start = self.start, 0
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


@pytest.fixture
def lab(tmp_path: Path) -> SimpleNamespace:
    """What a test needs: ``module(**options)``, ``loader(num_batches)``, ``trainer(**options)``."""

    def trainer(**options: object) -> Trainer:
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": tmp_path,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": False,
            "max_epochs": 2,
        }
        return Trainer(**(settings | options))

    return SimpleNamespace(module=Pair, loader=Batches, trainer=trainer)
