"""What hooks do with weights, of which each rank has a part: right, or an error with its line."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.integration.jobs import run, run_job
from tests.integration.test_found import distil
from tests.integration.trainings import CLOSE, Training


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    )


class Averages(LightningModule):
    """A student, and its average under a name of its own."""

    is_called = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = network()
        self.ema: Any = deepcopy(self.student).requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        made = self.student(x)
        loss = cross_entropy(made, y)
        if self.is_called:
            with torch.no_grad():
                late = self.ema(x)
            loss = loss + mse_loss(made, late)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for late, new in zip(self.ema.parameters(), self.student.parameters(), strict=True):
            late.mul_(0.9).add_(new, alpha=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


class AveragesUncalled(Averages):
    is_called = False


class ByTorch(Averages):
    """torch's own average."""

    def __init__(self) -> None:
        super().__init__()
        self.ema = AveragedModel(self.student, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.update_parameters(self.student)


class ByTorchUncalled(ByTorch):
    is_called = False


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = network()
        self.teacher = deepcopy(self.student).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            late = self.teacher(x)
        return self.student(x), late


class Wrapped(LightningModule):
    """One module holds both, as stable-pretraining's TeacherStudentWrapper does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.networks, self.predictor = Wrapper(), nn.Linear(4, 4)

    def training_step(self, batch: Any, _: int) -> Tensor:
        made, late = self.networks(batch[0])
        return mse_loss(self.predictor(made), late)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        both = self.networks.teacher.parameters(), self.networks.student.parameters()
        for late, new in zip(*both, strict=True):
            late.mul_(0.9).add_((1 - 0.9) * new)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Averages, AveragesUncalled, ByTorch, ByTorchUncalled, Wrapped])
def test_averages_lie_with_what_they_average(kind: type[LightningModule], tmp_path: Path) -> None:
    """torch adds nothing, silently, if a tensor without values is added in place."""
    training = Training(sizes=((4, 4, 3),))
    alone = replace(training, strategy="auto", num_ranks=1)
    ((expected, _),) = run(distil, alone, kind, num_ranks=1, folder=tmp_path / "alone")
    job = partial(distil, schedule="gpipe", num_microbatches=1)
    actual, table = run(job, training, kind, num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
    assert "forward-only" in table


class Apart(Averages):
    """The average lies beside the loss, by names, and what it averages in the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.student
        del self.student

    def training_step(self, batch: Any, _: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1]) + 0 * self.ema(batch[0]).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Adds(Apart):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for late, new in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            late.mul_(0.9).add_(0.1 * new)  # of another rank


class AddsAll(Apart):
    @torch.no_grad()
    def on_before_zero_grad(self, _optimizer: Any) -> None:
        torch._foreach_add_([*self.ema.parameters()], [*self.net.parameters()])  # of another rank


class AddsInItsStep(Apart):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for late, new in zip(self.net.parameters(), self.ema.parameters(), strict=True):
                late.mul_(0.9).add_(new)  # of another rank
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Adds, AddsAll, AddsInItsStep])
def test_weights_of_other_ranks_are_refused(kind: type[LightningModule], tmp_path: Path) -> None:
    job = run_job(
        partial(distil, student="net", schedule="gpipe", num_microbatches=1),
        Training(sizes=((4, 4, 3),)), kind, num_ranks=2, folder=tmp_path,
    )  # fmt: skip
    told = [error for error in job.errors if "of another rank" in error]
    assert told, job.output
    assert "lie on another rank" in told[0] or "lies on another rank" in told[0]
    assert "MomentumEMA" in told[0]
