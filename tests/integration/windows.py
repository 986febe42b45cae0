"""Modules that are trained in windows of accumulated batches, in a pipeline and on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from lightning_tspipe import MomentumEMA
from lightning_tspipe.ir.action import Op
from tests.exactness.tied import LENGTH, WORDS, LanguageModel, next_words
from tests.integration.jobs import run
from tests.integration.trainings import CLOSE, RESUMING, Epochs, Session, Trained, Training

WINDOWS = Training(strategy="tspipe_1f1b")


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
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


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


class LearnsFromLarge(Distils):
    """The same with a teacher whose layers take several times as long."""

    student_names, teacher_names = ("student",), ("teacher",)

    def __init__(self) -> None:
        super().__init__()
        wide = (nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(8))
        teacher = nn.Sequential(nn.Linear(6, 48), *wide, nn.Linear(48, 4))
        self.teacher = teacher.requires_grad_(requires_grad=False)

    def on_train_end(self) -> None:
        """On a rank of a pipeline, the teacher's stages."""
        engine = getattr(self.trainer.strategy, "engine", None)
        if engine is not None:
            self.stages = engine.pipeline.teacher.ranks


class Averages(Distils):
    """The same with a teacher that is averaged after each update."""

    def configure_callbacks(self) -> Any:
        return MomentumEMA(momentum=0.9)


class Counts(Distils):
    """The same, and BatchNorm averages over all batches that there were."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = None  # type: ignore[assignment]


class Again(Classifier):
    """Its student is called on what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.student[-1] = nn.Linear(6, 6)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.student(self.student(x) + x), y)


class AveragesInSteps(Distils):
    """The same with a teacher that the step averages, in each batch."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        with torch.no_grad():
            for own, mean in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                mean.lerp_(own, 0.1)
        return super().training_step(batch, index)


class AveragesInHooks(Distils):
    """The same with a teacher that a hook averages, behind each batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for own, mean in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                mean.lerp_(own, 0.1)


class Leaves(Classifier):
    """Its BatchNorm is in eval mode from the middle of a window on."""

    def on_train_batch_end(self, _outputs: Any, _batch: Any, index: int) -> None:
        if index == 2:
            next(m for m in self.student.modules() if isinstance(m, nn.BatchNorm1d)).eval()


class Warms(Distils):
    """It reads its teacher from the second update on, and once more from the second epoch on."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        made = Classifier.loss(self, x, y)
        if self.global_step >= 1:
            made = made + F.mse_loss(self.student(x + 1), self.teacher(x))
        if self.current_epoch >= 1:
            made = made + self.student(x - 1).square().mean()
        return made


class Alternates(Distils):
    """It reads its teacher in every second batch."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index % 2:
            return super().training_step(batch, index)
        return Classifier.loss(self, *batch)


class Scale(nn.Module):
    """Multiplies by an attribute."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Scales(Classifier):
    """A hook changes what a layer of its own multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.student.insert(0, self.scale)

    def on_train_batch_end(self, *_: Any) -> None:
        self.scale.factor += 0.1


class Branches(nn.Module):
    """A trunk, and two branches off its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = layers()
        self.other, self.third = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk[0](x)
        other, third = self.other(h), self.third(h)
        return self.trunk[1:](h), other, third


class Forgets(Classifier):
    """No loss depends on one branch, and only some on another; a decay would change both."""

    used = (True, True, False, False, False, False)

    def __init__(self) -> None:
        super().__init__()
        self.student: Any = Branches()

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        one, other, _ = self.student(x)
        loss = F.cross_entropy(one + other if self.used[index] else one, y)
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=0.05, weight_decay=0.3)


class Norms(Classifier):
    """Logs the norm of all gradients behind each backward."""

    def on_after_backward(self) -> None:
        if hasattr(self.trainer.strategy, "grad_norm"):
            norm = self.trainer.strategy.grad_norm()
        else:
            norm = nn.utils.get_total_norm(
                [p.grad for p in self.parameters() if p.grad is not None]
            )
        self.log("norm", norm.double(), on_step=True, on_epoch=True)


class ReadsGradients(Classifier):
    """Reads a gradient behind each backward."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.grad.norm() > 1e9:
                raise ValueError


class ChangesItsMind(Classifier):
    """Makes the window shorter when it has begun."""

    def on_train_batch_start(self, _: Any, index: int) -> None:
        if index == 1:
            self.trainer.accumulate_grad_batches = 2


class LeavesBetween(Leaves):
    """The same behind an update."""

    def on_train_batch_end(self, _outputs: Any, _batch: Any, index: int) -> None:
        super().on_train_batch_end(_outputs, _batch, index - 1)


class Shifts(Distils):
    """A hook shifts what a teacher in eval mode subtracts."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.get_buffer("0.1.running_mean").add_(0.1)

    def on_train_epoch_start(self) -> None:
        self.teacher.eval()


class Speaks(Classifier):
    """A language model, whose head is its table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.student: Any = LanguageModel()
        del self.student.kind

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return next_words(self.student(y), y)


class Looks(Speaks):
    """The same with a table whose gradient is sparse, beside a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.student.trunk.words = nn.Embedding(WORDS, 6, sparse=True)
        self.student.head.weight = nn.Parameter(torch.randn(WORDS, 6) / 6)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.2)


def batches(sizes: tuple[int, ...], epochs: int = 2) -> list[list[Any]]:
    made = torch.Generator().manual_seed(7)

    def batch(size: int, kind: Tensor) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 6, generator=made), kind

    def labels(size: int) -> Tensor:
        return torch.randint(4, (size,), generator=made)

    return [[batch(n, labels(n)) for n in sizes] for _ in range(epochs)]


def loader(sizes: tuple[int, ...], epochs: int = 2) -> Epochs:
    return Epochs(batches(sizes, epochs))


def sentences(sizes: tuple[int, ...], epochs: int = 2) -> Epochs:
    made = torch.Generator().manual_seed(7)
    return Epochs([
        [(torch.zeros(n, 1), torch.randint(WORDS, (n, LENGTH), generator=made)) for n in sizes]
        for _ in range(epochs)
    ])  # fmt: skip


def train(training: Training, kind: type[Classifier], *callbacks: Any, **arguments: Any) -> Trained:
    (sizes,) = set(training.sizes)
    batches = (sentences if issubclass(kind, Speaks) else loader)(sizes, len(training.sizes))
    session = Session(training, *callbacks, module=kind(), ignored=[RESUMING])
    return session.fit(batches, **arguments).trained


def of(every: int, sizes: tuple[int, ...], **trainer: Any) -> Training:
    arguments = {"accumulate_grad_batches": every, **trainer}
    return replace(WINDOWS, sizes=(sizes, sizes), trainer=arguments)


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


SLOW = pytest.mark.slow
INTERLEAVED, TO_AND_FRO = "tspipe_interleaved", "tspipe_zbv"
ONE_F_ONE_B = "tspipe_1f1b"


class RunsHalves(Callback):
    """Checks that each stage of a pipeline but the first runs its backwards in halves."""

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            ops = {action.op for action in engine._step[2].program.ranks[engine.rank]}
            is_first = engine.rank == engine.pipeline.student.ranks[0]
            assert (Op.BACKWARD in ops, Op.WEIGHT_BACKWARD in ops) == (is_first, not is_first)


def halves_run() -> list[Callback]:
    return [RunsHalves()]


def in_halves(training: Training) -> Training:
    """1F1B whose backwards run in halves."""
    options = {"schedule": "1f1b", "weights": "synchronous", "split_backward": True}
    return replace(training, strategy="instance", options=options, callbacks=halves_run)


def by_schedule(cases: list[tuple[type[Classifier], Training, int, set[str]]]) -> list[Any]:
    """Each case under each schedule: what is trained, how, and on how many ranks.

    Args:
        cases: The same, and the schedules that are not slow tests.
    """
    return [
        pytest.param(
            kind, replace(training, strategy=name), num_ranks, marks=[SLOW] * (name not in quick)
        )
        for kind, training, num_ranks, quick in cases
        for name in (ONE_F_ONE_B, INTERLEAVED, TO_AND_FRO)
    ]
