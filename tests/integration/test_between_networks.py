"""Values between two networks, and gradients: right, or an error with its line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_tspipe import TSPipeStrategy
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Epochs, Recorder, quiet_trainer, weights_of

NETWORKS = ("net", "head")


class Chain(LightningModule):
    """A backbone and a head, with a mean over positions between them."""

    lengths: tuple[int, ...] = (5, 5, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def between(self, h: Tensor) -> Tensor:
        return h.mean(1)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return 10 * cross_entropy(self.head(self.between(self.net(x))), y)

    def batches(self) -> list[Any]:
        draws = torch.Generator().manual_seed(1)
        return [
            (torch.randn(4, n, 6, generator=draws), torch.randint(4, (4,), generator=draws))
            for n in self.lengths
        ]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Divided(Chain):
    def between(self, h: Tensor) -> Tensor:
        return h.sum(1) / h.shape[1]


class DividedVarying(Divided):
    lengths = (5, 5, 5, 5, 3)


class RowsVarying(Chain):
    lengths = (5, 5, 5, 5, 3)

    def between(self, h: Tensor) -> Tensor:
        return h.mean(1).view(h.shape[0], -1)


class InPlace(Chain):
    """A head that begins by writing into what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 4))


class InPlaceUsed(InPlace):
    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        h = self.between(self.net(x))
        return cross_entropy(self.head(h), y) + h.mean()


class GradientsOff(Chain):
    """A hook says whether the head is trained."""

    is_on = True

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        h = self.between(self.net(x))
        with torch.set_grad_enabled(self.is_on):
            made = self.head(h)
        return cross_entropy(made + h[:, :4], y)

    def on_train_batch_start(self, _: Any, batch_idx: int) -> None:
        self.is_on = batch_idx < 2


class Clamped(Chain):
    """Gradients of single parameters are clipped; each network is called twice."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x, y), batch_idx) + super().training_step(
            (2 * x, y), batch_idx
        )


class ClampedTied(Clamped):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head[2].weight = self.net[2].weight


class ClampedLate(Chain):
    """Those hooks that follow when gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.clamp)

    @staticmethod
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)


CASES = {
    each.__name__: each
    for each in (
        Divided, DividedVarying, RowsVarying, InPlace, InPlaceUsed, GradientsOff, Clamped,
        ClampedTied, ClampedLate,
    )
}  # fmt: skip


def train(case: str, num_microbatches: int, *, is_alone: bool) -> Any:
    module, recorder, strategy = CASES[case](), Recorder(), None
    if not is_alone:
        strategy = TSPipeStrategy(
            student=list(NETWORKS), schedule="gpipe", num_microbatches=num_microbatches,
            costs="flops",
        )  # fmt: skip
    trainer = quiet_trainer(
        strategy=strategy or "auto", devices=1 if is_alone else 2, accelerator="cpu", max_epochs=1,
        callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(module, Epochs([module.batches()]))
    return recorder.losses, weights_of(module)


@pytest.mark.parametrize(
    ("case", "num_microbatches"),
    [
        ("Divided", 1), ("RowsVarying", 1), ("InPlace", 2), ("Clamped", 2), ("ClampedTied", 2),
        ("ClampedLate", 2),
    ],
)  # fmt: skip
def test_right(case: str, num_microbatches: int, tmp_path: Path) -> None:
    one = partial(train, case, num_microbatches)
    (expected,) = run(partial(one, is_alone=True), num_ranks=1, folder=tmp_path / "alone")
    actual, _ = run(partial(one, is_alone=False), num_ranks=2, folder=tmp_path / "together")
    assert len(set(map(float, expected[0]))) > 1
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("DividedVarying", "asks for the sizes of an output"),
        ("InPlaceUsed", "writes into what it is given"),
        ("GradientsOff", "calls 'head' without gradients"),
    ],
)
def test_refused(case: str, told: str, tmp_path: Path) -> None:
    job = run_job(partial(train, case, 1, is_alone=False), num_ranks=2, folder=tmp_path)
    assert all(rank.exit_code for rank in job.ranks)
    assert told in job.output
    assert "test_between_networks.py" in job.output
