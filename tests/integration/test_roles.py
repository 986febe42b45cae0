"""Networks that begin to be trained, or cease to be: as on one device, or an error."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from lightning_tspipe import TSPipeStrategy
from tests.integration.comparing import alone
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Epochs, Session, Trained, Training

TRAINING = Training(options={"num_microbatches": 2, "costs": "flops"})


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(),
        nn.Linear(6, 6),
    )  # fmt: skip


class Probed(LightningModule):
    """A backbone without a name that would tell, frozen in the first epoch."""

    names: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = network(), network()
        self.is_thawed = False

    def on_train_epoch_start(self) -> None:
        self.backbone.requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return mse_loss(self.head(self.backbone(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ProbedWithoutGradients(Probed):
    def on_train_epoch_start(self) -> None:
        """Nothing is frozen."""

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        with torch.set_grad_enabled(self.global_step > 3):
            features = self.backbone(x)
        return mse_loss(self.head(features), y)


class TakesTurns(ProbedWithoutGradients):
    """What was the teacher is the student in the next epoch."""

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        even = self.current_epoch % 2 == 0
        learns, knows = (self.backbone, self.head) if even else (self.head, self.backbone)
        with torch.no_grad():
            aim = knows(x)
        return mse_loss(learns(x), aim + y)


class HookedLater(Probed):
    """What a part returns becomes another thing where an epoch begins."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone[1].register_forward_hook(lambda *kept: kept[-1] * 2)


class HookedInTurns(HookedLater):
    """What was captured before the hook is not what it was."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.head(self.backbone(x)), y)
        return loss + self.head(self.backbone(y)).square().mean() if batch_idx % 2 else loss


class Coding(nn.Module):
    """Gives codes, if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor, *, codes: bool = False) -> Tensor:
        made: Tensor = self.body(x)
        return made.argmax(1) if codes else made


class Codes(ProbedWithoutGradients):
    """A call of a trained network gives integers only: it has no backward, and needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone: Any = Coding()

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.backbone(y), self.backbone(x, codes=True))


class ThawedInTheMiddle(Probed):
    """By a name that tells, in the middle of an epoch."""

    names: ClassVar[dict[str, Any]] = {"student": ["backbone", "head"]}

    def on_train_epoch_start(self) -> None:
        self.backbone.requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return mse_loss(self.backbone(x), y) + mse_loss(self.head(x), y)

    def on_train_batch_start(self, *_: Any) -> None:
        self.backbone.requires_grad_(self.global_step > 1)


class ThawedTeacher(Probed):
    names: ClassVar[dict[str, Any]] = {"student": ["head"], "teacher": ["backbone"]}

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, _ = batch
        return mse_loss(self.head(x), self.backbone(x))


class Prompted(Probed):
    """A parameter of the module's own before the only network."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.prompt = self.backbone, nn.Parameter(torch.ones(6))
        del self.backbone, self.head

    def on_train_epoch_start(self) -> None:
        """Nothing is frozen."""

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return mse_loss(self.student(x + self.prompt), y)


class PromptedWithoutNames(Prompted):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.student
        del self.student

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return mse_loss(self.net(x + self.prompt), y)


def train(training: Training, kind: type[Probed]) -> Trained:
    made = torch.Generator().manual_seed(1)
    epochs = [
        [tuple(torch.randn(4, 6, generator=made) for _ in range(2)) for _ in range(3)]
        for _ in range(3)
    ]
    strategy: Any = training.strategy
    if strategy != "auto":
        strategy = TSPipeStrategy(**training.options, **kind.names)
    return Session(training, module=kind(), strategy=strategy).fit(Epochs(epochs)).trained


@pytest.mark.parametrize(
    "kind", [Probed, ProbedWithoutGradients, TakesTurns, HookedLater, HookedInTurns, Codes]
)
def test_networks_whose_part_changes(kind: type[Probed], tmp_path: Path) -> None:
    # What is trained in turns has no teacher that would run ahead on other weights.
    training = replace(TRAINING, options={**TRAINING.options, "schedule": "gpipe"})
    expected = run(train, alone(training), kind, num_ranks=1, folder=tmp_path / "alone")[0]
    actual = run(train, training, kind, num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (ThawedInTheMiddle, "'backbone', called by the step at .*test_roles.py.* had nothing"),
        (ThawedTeacher, "the teacher's output requires gradients"),
        (PromptedWithoutNames, "What is given self.prompt, .* let a module hold it"),
        (Prompted, "the input of 'student' depends on trained parameters outside .*test_roles.py"),
    ],
)  # fmt: skip
def test_what_can_not_change(kind: type[Probed], told: str, tmp_path: Path) -> None:
    job = run_job(train, TRAINING, kind, num_ranks=2, folder=tmp_path)
    errors = [error for error in job.errors if not error.startswith("TransportError")]
    assert errors
    assert all(re.search(told, error) for error in errors), errors
