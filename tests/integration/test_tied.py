"""Language models whose embedding and head share a weight, under a real Trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.exactness.tied import Tied
from tests.integration.comparing import alone
from tests.integration.jobs import run, run_job
from tests.integration.trainings import Session, Trained, Training, train

EXACT = {"rtol": 1e-12, "atol": 1e-12}
ACCUMULATING = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
TRAINING = Training(
    "Tied", "instance", {"num_microbatches": 1, "schedule": "gpipe"}, optimizer="adamw",
    trainer=ACCUMULATING,
)  # fmt: skip


class Save(Callback):
    """Keeps checkpoints of some batches."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        place = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if place in {2, 5}:
            trainer.save_checkpoint(f"{place}.ckpt")


def stopped(training: Training, stops: tuple[int, ...]) -> tuple[Trained, list[Trained]]:
    """A whole run, and what became of it from some of its checkpoints."""
    tokens: Any = Tied().batch(14, 0)  # batches of 4, 4, 4 and 2
    whole = Session(training, Save()).fit(DataLoader(tokens, 4)).trained
    return whole, [
        Session(training).fit(DataLoader(tokens, 4), ckpt_path=f"{stop}.ckpt").trained
        for stop in stops
    ]


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [("Tied", 2), ("TiedBesideTheLoss", 2),
     pytest.param("Tied", 4, marks=pytest.mark.slow),
     pytest.param("TiedFirst", 2, marks=pytest.mark.slow),
     pytest.param("SharedLayers", 3, marks=pytest.mark.slow)],
)  # fmt: skip
def test_clipping_accumulation_and_checkpoints(case: str, num_ranks: int, tmp_path: Path) -> None:
    training = replace(TRAINING, case=case, num_ranks=num_ranks)
    folders = [tmp_path / "alone", tmp_path / "together"]
    ((expected, _),) = run(stopped, alone(training), (), num_ranks=1, folder=folders[0])
    ranks = run(stopped, training, (2, 5), num_ranks=num_ranks, folder=folders[1])
    whole, resumed = ranks[0]
    assert len(set(map(float, expected.losses))) == 8
    for each in (whole, *resumed):
        losses = expected.losses[8 - len(each.losses) :]
        torch.testing.assert_close(each.losses, losses, **EXACT)
        torch.testing.assert_close(each.weights, expected.weights, **EXACT)
    assert [len(each.losses) for each in resumed] == [6, 3]
    own, others = (torch.load(f / "5.ckpt", "cpu", weights_only=False) for f in folders)
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(others[key], own[key], **EXACT)
    assert whole.meta == []
    assert all(rank.meta for rank, _ in ranks[1:])


class Noise(Callback):
    """Changes gradients otherwise on each rank."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad += 0.1 + trainer.strategy.pipelined.is_loss_rank


def noisy() -> list[Any]:
    return [Noise()]


def by_hand(module: Any) -> None:
    """Optimizes by hand, every other batch."""
    step, module.automatic_optimization = module.training_step, False

    def training_step(batch: Any, batch_idx: int) -> None:
        module.manual_backward(step(batch, batch_idx))
        if batch_idx % 2:
            module.optimizers().step()
            module.optimizers().zero_grad()

    module.training_step = training_step


def test_optimization_by_hand(tmp_path: Path) -> None:
    training = replace(TRAINING, change=by_hand, trainer={})
    folders = [tmp_path / "alone", tmp_path / "together"]
    (expected,) = run(train, alone(training), num_ranks=1, folder=folders[0])
    actual, _ = run(train, training, num_ranks=2, folder=folders[1])
    torch.testing.assert_close(actual.weights, expected.weights, **EXACT)
    assert not torch.equal(actual.weights["student.head.weight"], Tied().student.head.weight)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (replace(TRAINING, callbacks=noisy, trainer={}), "'student.trunk.words.weight' is tied"),
        (replace(TRAINING, case="TiedBesideTheLoss", change=by_hand, trainer={}),
         "its gradients can't be told apart"),
    ],
)  # fmt: skip
def test_what_cannot_be_tied(training: Training, message: str, tmp_path: Path) -> None:
    job = run_job(train, training, num_ranks=2, folder=tmp_path)
    assert all(message in error for error in job.errors), job.errors
