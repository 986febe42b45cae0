"""Networks that mix the samples of a batch are not divided into micro-batches."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_tspipe import TSPipeStrategy
from tests.device import SHARED
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Epochs, Session, Trained, Training

LEFT = {"costs": "flops", "schedule": "gpipe"}
ASKED = {"num_microbatches": 2, **LEFT}
PLACE = "test_mixing.py:"
ON_CPUS = pytest.mark.skipif(
    SHARED in os.environ, reason="no plan for GPUs divides such small ones"
)


class Centered(nn.Module):
    """Takes the mean of the batch away, as long as it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


class Attends(nn.Module):
    """Attention that takes the first dimension for the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return (x + self.attention(x, x, x, need_weights=False)[0]).squeeze(1)


class Shuffled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.flip(0)


class Draws(nn.Module):
    """Noise for each sample, and BatchNorm: neither is taken for mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x)) + torch.rand_like(x)


class Experts(nn.Module):
    """Each sample goes to one expert, with those that go there too."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            made = made.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return made


class Routed(Experts):
    """The same, but it looks which experts were chosen: without values it can't run."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            (rows,) = torch.where(chosen == number)
            made[rows] = self.experts[number](x[rows]) * weights[rows, None]
        return made


class Loses(nn.Module):
    """Returns a loss of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Scaled(nn.Module):
    """Is given a number beside the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = body(None), body(None)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        made: Tensor = self.last(self.first(x) * scale)
        return made


def body(kind: type[nn.Module] | None) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 8)) for _ in range(8)]
    own = [] if kind is None else [kind()]
    number = len(layers) if kind is Loses else 2
    return nn.Sequential(*layers[:number], *own, *layers[number:])


class Distils(LightningModule):
    def __init__(self, student: type[nn.Module] | None, teacher: type[nn.Module] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student: nn.Module = body(student)
        self.teacher: nn.Module = body(teacher)
        self.teacher.requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, _: int) -> Tensor:
        (x,) = batch
        with torch.no_grad():
            aim = self.teacher(x)
        return mse_loss(self.student(x), aim)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scales(Distils):
    """Gives both networks a number that is made of the whole batch."""

    def __init__(self, *kinds: type[nn.Module] | None) -> None:
        super().__init__(None, None)
        assert kinds == (Scaled, Scaled)
        self.student: nn.Module = Scaled()
        self.teacher: nn.Module = Scaled()
        self.teacher.requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, _: int) -> Tensor:
        (x,) = batch
        return mse_loss(self.student(x, x.std()), self.teacher(x, x.mean()))


def train(training: Training, *kinds: type[nn.Module] | None) -> Trained:
    made = torch.Generator().manual_seed(1)
    batches = [(torch.randn(n, 8, generator=made),) for n in (256, 256, 160)]
    strategy: Any = TSPipeStrategy(**training.options) if training.num_ranks > 1 else "auto"
    module = Scales(*kinds) if Scaled in kinds else Distils(*kinds)
    session = Session(training, module=module, strategy=strategy)
    return session.fit(Epochs([batches])).trained


@ON_CPUS
@pytest.mark.parametrize("kinds", [(Centered, None), (None, Attends), (Shuffled, None)], ids=str)
def test_whole_batches(kinds: tuple[type[nn.Module] | None, ...], tmp_path: Path) -> None:
    training = Training(options=LEFT)
    alone = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, alone, *kinds, num_ranks=1, folder=tmp_path / "alone")
    job = run_job(train, training, *kinds, num_ranks=2, folder=tmp_path / "together")
    actual, told = job.ranks[0].value, job.ranks[0].output
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
    name = "teacher" if kinds[0] is None else "student"
    assert f"each call gets the whole batch: what self.{name}(...), at " in told
    assert PLACE in told


class Normalises(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(8)


def train_and_tell(training: Training) -> Trained:
    """With what is told of the run in the log."""
    logging.getLogger("lightning_tspipe").addHandler(logging.StreamHandler())
    return train(training, Normalises, None)


@ON_CPUS
def test_what_was_placed_and_over_what_batchnorm_normalises_is_told_once(tmp_path: Path) -> None:
    job = run_job(train_and_tell, Training(options=LEFT), num_ranks=2, folder=tmp_path)
    assert not any(job.errors), job.errors
    told = "".join(rank.output for rank in job.ranks)
    rows = [line.split()[:2] for line in told.splitlines()]
    assert [rows.count(row) for row in (["student", "trained"], ["teacher", "forward-only"])] == [
        1,
        1,
    ]
    (line,) = (line for line in told.splitlines() if line.startswith("BatchNorm normalises over"))
    assert "of 256 in a batch" in line
    assert "TSPipeStrategy(num_microbatches=1)" in line


def train_pairs(training: Training, *, pipelined: bool) -> Trained:
    """Of two samples each: BatchNorm has nothing to normalise in half of one."""
    strategy: Any = TSPipeStrategy(**training.options) if pipelined else "auto"
    session = Session(training, module=Distils(Normalises, None), strategy=strategy)
    return session.fit(Epochs([[(torch.ones(2, 8).tril(-n),) for n in range(3)]])).trained


def test_halves_of_a_batch_that_are_too_small(tmp_path: Path) -> None:
    pair = Training(options=LEFT, num_ranks=1)
    expected, actual = (
        run(partial(train_pairs, pipelined=way), pair, num_ranks=1, folder=tmp_path / str(way))[0]
        for way in (False, True)
    )
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    asked = Training(options=ASKED, num_ranks=1)
    job = run_job(partial(train_pairs, pipelined=True), asked, num_ranks=1, folder=tmp_path)
    assert "'student' can't run with micro-batches of 1 of 2 samples" in job.errors[0]
    assert "TSPipeStrategy(num_microbatches=1)" in job.errors[0]


def test_micro_batches_that_were_asked_for(tmp_path: Path) -> None:
    job = run_job(train, Training(options=ASKED), Centered, None, folder=tmp_path)
    assert len(job.errors) == 2
    for error in job.errors:
        assert error.startswith("UndividedError: what self.student(...), at ")
        assert PLACE in error
        assert "TSPipeStrategy(num_microbatches=1)" in error


def test_micro_batches_of_a_loss_of_its_own(tmp_path: Path) -> None:
    """Tells what can't be put together, though a loss depends on all samples too."""
    job = run_job(train, Training(options=ASKED), Loses, Loses, folder=tmp_path)
    for error in job.errors:
        assert "has shape () for 128 samples" in error
        assert "TSPipeStrategy(num_microbatches=1)" in error


@pytest.mark.parametrize(
    "kind", [Routed, *(pytest.param(x, marks=pytest.mark.slow) for x in (Experts, Scaled))]
)
def test_what_mixes_nothing(kind: type[nn.Module], tmp_path: Path) -> None:
    training = Training(options=ASKED)
    alone = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, alone, kind, kind, num_ranks=1, folder=tmp_path / "alone")
    actual = run(train, training, kind, kind, num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


def test_noise_and_batchnorm_are_not_taken_for_mixing(tmp_path: Path) -> None:
    run(train, Training(options=ASKED), Draws, Draws, num_ranks=2, folder=tmp_path)
