"""What a loss does not depend on has no gradient, and optimizers leave it out: as on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_tspipe import TSPipeStrategy
from tests.integration.comparing import alone
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Epochs, Session, Trained, Training

TRAINING = Training(
    options={"num_microbatches": 2, "costs": "flops"}, sizes=((4, 4, 4, 4), (4, 3, 4, 4))
)
Step = Callable[..., Tensor]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


class Pair(LightningModule):
    """Two that are trained: one of them lies on another rank than the loss."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = network(), network(), nn.Linear(6, 6)
        self.step, self.is_set = step, False
        self.automatic_optimization = step is not by_hand

    def on_train_batch_start(self, _: Any, batch_idx: int) -> None:
        self.is_set = batch_idx == 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, *batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


def by_turns(module: Pair, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
    made, other = module.one(x), module.two(x)
    return mse_loss(made if batch_idx % 2 else other, y)


def behind_a_warm_up(module: Pair, x: Tensor, y: Tensor, _: int) -> Tensor:
    made = module.two(module.one(x))
    return mse_loss(module.head(made.detach() if module.global_step < 3 else made), y)


def for_the_log(module: Pair, x: Tensor, y: Tensor, _: int) -> Tensor:
    made, other = module.two(x), module.one(x)
    module.log("other", other.mean())
    return mse_loss(made, y)


def by_values(module: Pair, x: Tensor, y: Tensor, _: int) -> Tensor:
    """Not of the first batch: that some have none is known from then on."""
    made, other = module.one(x), module.two(x)
    loss = mse_loss(other, y)
    return loss + mse_loss(made, y) if y[0, 0] > 1 else loss


def by_hand(module: Pair, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
    loss = by_turns(module, x, y, batch_idx)
    optimizer: Any = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return loss


def by_a_flag(module: Pair, x: Tensor, y: Tensor, _: int) -> Tensor:
    made, other = module.one(x), module.two(x)
    return mse_loss(made.detach() if module.is_set else made, y) + mse_loss(other, y)


def train(training: Training, step: Step) -> Trained:
    made = torch.Generator().manual_seed(1)
    epochs = [
        [tuple(torch.randn(n, 6, generator=made) for _ in range(2)) for n in sizes]
        for sizes in training.sizes
    ]
    for number, (_, y) in enumerate(batch for batches in epochs for batch in batches):
        y[0, 0] = 2 * (number % 3 == 1)
    strategy: Any = (
        training.strategy if training.strategy == "auto" else TSPipeStrategy(**training.options)
    )
    return Session(training, module=Pair(step), strategy=strategy).fit(Epochs(epochs)).trained


@pytest.mark.parametrize(
    ("step", "trainer", "number"),
    [
        (by_turns, {}, 1),
        (behind_a_warm_up, {}, 1),
        (by_values, {"accumulate_grad_batches": 2}, 1),
        pytest.param(by_turns, {"accumulate_grad_batches": 2}, 1, marks=pytest.mark.slow),
        pytest.param(by_values, {}, 1, marks=pytest.mark.slow),
        pytest.param(by_values, {}, 2, marks=pytest.mark.slow),
        pytest.param(for_the_log, {}, 1, marks=pytest.mark.slow),
        pytest.param(by_hand, {}, 1, marks=pytest.mark.slow),
    ],
)
def test_what_a_loss_does_not_depend_on(
    step: Step, trainer: dict[str, Any], number: int, tmp_path: Path
) -> None:
    ranks = 2 * number
    options = {**TRAINING.options, "num_stages": 2}
    training = replace(TRAINING, trainer=trainer, options=options, num_ranks=ranks)
    expected = run(train, alone(training), step, num_ranks=1, folder=tmp_path / "alone")[0]
    actual = run(train, training, step, num_ranks=ranks, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


def test_a_step_that_loses_gradients_unexpectedly(tmp_path: Path) -> None:
    job = run_job(train, TRAINING, by_a_flag, num_ranks=2, folder=tmp_path)
    (error,) = {error for error in job.errors if error.startswith("CaptureError")}
    assert "does not depend on 'one.0.weight'" in error
    assert "multiply by 0" in error
