"""Replicas of a pipeline: evaluation, decisions and skipped steps are those of one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import DataLoader

from lightning_tspipe import DelayedTeacherUpdate, MomentumEMA
from tests.integration.by_hand import Notes, calls
from tests.integration.comparing import both
from tests.integration.replicas import (
    UNREDUCED,
    TrainedShare,
    add_validation,
    dataset,
    fit,
    of_both_replicas,
    place,
    shares_of,
)
from tests.integration.trainings import (
    CLOSE,
    Session,
    Training,
    weights_of,
)

REPLICATED = Training(
    "Classifier-group", "instance", {"num_stages": 2, "num_microbatches": 2}, num_ranks=4,
    sizes=((4, 4, 2, 4, 4, 2), (4, 4, 2, 4, 4, 2)),
)  # fmt: skip


def decides() -> list[Any]:
    return [
        EarlyStopping("val_loss", patience=1, min_delta=10.0),
        # Each replica has its own value; that of rank 0 counts for all.
        EarlyStopping("apart", patience=0, mode="max"),
        ModelCheckpoint(dirpath="saved", monitor="val_loss", save_top_k=1, filename="{epoch}"),
    ]


def evaluate_in_parts(module: Any) -> None:
    add_validation(module)
    step = module.validation_step

    def validation_step(batch: Any, batch_idx: int) -> None:
        step(batch, batch_idx)
        direction = 1 - 2 * getattr(module.trainer.strategy, "replica", 0)
        module.log("apart", direction * float(module.current_epoch + 1))
        module.log(
            "grouped", batch[1].sum().double(), reduce_fx="sum", sync_dist=True,
            sync_dist_group=dist.group.WORLD,
        )  # fmt: skip

    def configure_optimizers() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=10.0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }

    module.validation_step = validation_step
    module.test_step = step
    module.predict_step = lambda batch, batch_idx: (module.net(batch[0]), batch[1])
    module.configure_optimizers = configure_optimizers


@dataclass
class Decided:
    """What a rank knows after a fit, a test and a prediction."""

    epoch: int
    grouped: float
    rate: float
    best: str
    tested: Any
    predicted: list[Any]
    weights: dict[str, Tensor]


def fit_test_and_predict(training: Training) -> Decided:
    ignored = [UNREDUCED, "Using `DistributedSampler` with the dataloaders"]
    it = Session(training, change=evaluate_in_parts, ignored=ignored)
    _, number = place(training)
    data = dataset(16, 1)
    train = of_both_replicas(data, 2, 6) if number == 1 else DataLoader(data, 2)
    trainer = it.fit(train, DataLoader(dataset(12, 2), 4 // number)).trainer
    epoch, rate = trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"]
    grouped = float(trainer.callback_metrics["grouped"])
    tested = it.test(DataLoader(dataset(12, 3), 4 // number))
    predicted = it.predict(DataLoader(dataset(12, 3), 4 // number))
    best = Path(trainer.checkpoint_callback.best_model_path).name
    return Decided(epoch, grouped, rate, best, tested[0], predicted, weights_of(it.module))


@pytest.mark.slow
def test_decisions_tests_and_predictions(tmp_path: Path) -> None:
    training = replace(
        REPLICATED, callbacks=decides, trainer={"max_epochs": 6, "enable_checkpointing": True}
    )
    expected, ranks = both(fit_test_and_predict, training, tmp_path, 4)
    assert expected.epoch == 2  # of 6
    assert expected.rate < 0.1
    for rank in ranks:
        assert (rank.epoch, rank.grouped, rank.rate, rank.best) == (
            expected.epoch, expected.grouped, expected.rate, expected.best,
        )  # fmt: skip
        assert rank.tested == pytest.approx(expected.tested, rel=1e-9)
    # Both ranks of a replica know the predictions of its part, as each rank does under ddp.
    outputs, targets = (torch.cat([batch[i] for batch in expected.predicted]) for i in (0, 1))
    for number, rank in enumerate(ranks):
        part = slice(number // 2, None, 2)
        torch.testing.assert_close(
            torch.cat([output for output, _ in rank.predicted]), outputs[part], **CLOSE
        )
        assert torch.equal(torch.cat([target for _, target in rank.predicted]), targets[part])
    for rank in ranks[::2]:
        torch.testing.assert_close(rank.weights, expected.weights, **CLOSE)


def averaged() -> list[Any]:
    return [MomentumEMA(0.9, student="student.0"), DelayedTeacherUpdate()]


def overflow_in_one_replica(module: Any) -> None:
    """The second replica's loss is infinite once; once only a gradient of one of its stages."""
    module.ema = "none"

    def is_second() -> bool:
        return getattr(module.trainer.strategy, "replica", 1) == 1

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        students, teachers = calls(module, batch)
        loss = -F.cosine_similarity(students[0], teachers[1]).mean()
        loss = loss - F.cosine_similarity(students[1], teachers[0]).mean()
        return loss.exp() * float("inf") if batch_idx == 1 and is_second() else loss

    def on_after_backward() -> None:
        *_, last = module.student.parameters()
        if module.trainer.fit_loop.total_batch_idx == 9 and is_second() and not last.is_meta:
            last.grad[0] = float("inf")

    module.training_step, module.on_after_backward = training_step, on_after_backward


def train_scaled_share(training: Training) -> TrainedShare:
    """With 16-bit precision's scaler; float64 is left as it is."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    training = replace(training, trainer={**training.trainer, "plugins": plugins})
    notes = Notes()
    trained = fit(training, shares_of(training), notes)
    trained.notes = {"scales": notes.scales, "steps": notes.steps}
    return trained


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        pytest.param({"gradient_clip_val": 0.05}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_overflow_skips_the_step_of_all_stages_and_replicas(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    training = replace(
        REPLICATED, case="Byol-group-2-by hand", callbacks=averaged, optimizer="adamw",
        change=overflow_in_one_replica, trainer=arguments,
    )  # fmt: skip
    expected, ranks = both(train_scaled_share, training, tmp_path, 4)
    scales = expected.notes["scales"]
    assert [scales[n] / scales[n - 1] for n in (1, 9)] == [0.5, 0.5]
    assert all(rank.notes == expected.notes for rank in ranks)
    for rank in ranks[::2]:
        torch.testing.assert_close(rank.weights, expected.weights, **CLOSE)
    torch.testing.assert_close(ranks[0].optimizer["state"], expected.optimizer["state"], **CLOSE)
