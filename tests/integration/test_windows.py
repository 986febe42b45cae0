"""Synchronous 1F1B: the batches of an accumulation window are the pipeline's, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_tspipe import MomentumEMA
from tests.exactness.tied import LENGTH, WORDS, LanguageModel, next_words
from tests.integration.comparing import both
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Epochs, RESUMING, Session, Trained, Training

WINDOWS = Training(strategy="tspipe_1f1b")
SLOW = pytest.mark.slow


def layers(dropout: float = 0.0) -> nn.Sequential:
    blocks = (
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout))
        for _ in range(4)
    )
    return nn.Sequential(*blocks, nn.Linear(6, 4))


class Classifier(LightningModule):
    """BatchNorm in a student that is trained alone."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = layers(self.dropout)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.student(x), y)

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.student.parameters(), lr=0.2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Drops(Classifier):
    """The same with dropout."""

    dropout = 0.3


class Distils(Classifier):
    """The same with a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = layers().requires_grad_(requires_grad=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + F.mse_loss(self.student(x), self.teacher(x))


class Averages(Distils):
    """The same with a teacher that is averaged after each update."""

    def configure_callbacks(self) -> Any:
        return MomentumEMA(momentum=0.9)


class AveragesInSteps(Distils):
    """The same with a teacher that the step averages, in each batch."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        with torch.no_grad():
            for own, mean in zip(
                self.student.parameters(), self.teacher.parameters(), strict=True
            ):
                mean.lerp_(own, 0.1)
        return super().training_step(batch, index)


class AveragesInHooks(Distils):
    """The same with a teacher that a hook averages, behind each batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for own, mean in zip(
                self.student.parameters(), self.teacher.parameters(), strict=True
            ):
                mean.lerp_(own, 0.1)


class Speaks(Classifier):
    """A language model, whose head is its table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.student: Any = LanguageModel()
        del self.student.kind

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return next_words(self.student(y), y)


def loader(sizes: tuple[int, ...], epochs: int = 2) -> Epochs:
    made = torch.Generator().manual_seed(7)

    def batch(size: int, kind: Tensor) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 6, generator=made), kind

    def labels(size: int) -> Tensor:
        return torch.randint(4, (size,), generator=made)

    return Epochs([[batch(n, labels(n)) for n in sizes] for _ in range(epochs)])


def sentences(sizes: tuple[int, ...], epochs: int = 2) -> Epochs:
    made = torch.Generator().manual_seed(7)
    return Epochs([
        [(torch.zeros(n, 1), torch.randint(WORDS, (n, LENGTH), generator=made)) for n in sizes]
        for _ in range(epochs)
    ])  # fmt: skip


def train(training: Training, kind: type[Classifier], *callbacks: Any, **arguments: Any) -> Trained:
    (sizes,) = set(training.sizes)
    batches = (sentences if kind is Speaks else loader)(sizes, len(training.sizes))
    session = Session(training, *callbacks, module=kind(), ignored=[RESUMING])
    return session.fit(batches, **arguments).trained


def of(every: int, sizes: tuple[int, ...], **trainer: Any) -> Training:
    arguments = {"accumulate_grad_batches": every, **trainer}
    return replace(WINDOWS, sizes=(sizes, sizes), trainer=arguments)


def check(training: Training, kind: type[Classifier], folder: Path, num_ranks: int = 2) -> None:
    def trained(one: Training) -> Trained:
        return train(one, kind)

    expected, ranks = both_of(training, kind, folder, num_ranks)
    same(expected, ranks)


def both_of(
    training: Training, kind: type[Classifier], folder: Path, num_ranks: int
) -> tuple[Trained, list[Trained]]:
    one = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(train, one, kind, num_ranks=1, folder=folder / "alone")
    piped = replace(training, num_ranks=num_ranks)
    return expected, run(train, piped, kind, num_ranks=num_ranks, folder=folder / "together")


def same(expected: Trained, ranks: list[Trained]) -> None:
    """All that was trained is what one device trains."""
    torch.testing.assert_close(ranks[0].losses, expected.losses, **CLOSE)
    assert ranks[0].metrics == pytest.approx(expected.metrics, rel=1e-9)
    found = {name: value for rank in ranks for name, value in rank.weights.items()}
    assert found.keys() == expected.weights.keys()
    for rank in ranks:
        assert rank.global_step == expected.global_step
        for name, value in rank.weights.items():
            torch.testing.assert_close(value, expected.weights[name], **CLOSE, msg=name)


@pytest.mark.parametrize(
    ("kind", "every", "sizes", "num_ranks", "trainer"),
    [
        (Classifier, 4, (5,) * 8, 2, {}),
        (Classifier, 3, (5, 5, 5, 5, 4), 3, {"gradient_clip_val": 0.1}),
        (Distils, 3, (5, 5, 4, 5), 2, {}),
        (Averages, 2, (5, 5, 4, 5, 3), 2, {}),
        (Speaks, 3, (4, 4, 3, 4), 2, {"gradient_clip_val": 0.1}),
        pytest.param(Classifier, 1, (5,) * 3, 2, {}, marks=SLOW),
        pytest.param(Classifier, 6, (5,) * 4, 4, {}, marks=SLOW),
        pytest.param(Averages, 4, (4,) * 7, 3, {"gradient_clip_val": 0.1}, marks=SLOW),
        pytest.param(Speaks, 2, (4, 4, 3), 3, {}, marks=SLOW),
    ],
)
def test_a_window_is_that_of_one_device(
    kind: type[Classifier], every: int, sizes: tuple[int, ...], num_ranks: int,
    trainer: dict[str, Any], tmp_path: Path,
) -> None:  # fmt: skip
    same(*both_of(of(every, sizes, **trainer), kind, tmp_path, num_ranks))
