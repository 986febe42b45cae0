"""A Trainer with the strategy trains exactly what one device trains."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightly.models.utils import update_momentum

from lightning_tspipe import DelayedTeacherUpdate, MomentumEMA
from tests.choosing import some_of
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting
from tests.integration.jobs import run
from tests.integration.trainings import CLOSE, Trained, Training, delayed, train, train_unsized

WORLDS = ("lightning.pytorch", "pytorch_lightning")


def assert_same(expected: Any, actual: Trained) -> None:
    assert len(set(map(float, actual.losses))) > 1
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    assert actual.weights.keys() == expected.weights.keys()
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


def reference(training: Training, schedule: str = "tspipe", num_microbatches: int = 1) -> Any:
    accumulate = training.trainer.get("accumulate_grad_batches", 1)
    setting = Setting(training.case, training.optimizer, training.sizes, accumulate=accumulate)
    return run_reference(replace(setting, schedule=schedule, num_microbatches=num_microbatches))


def pipelined(training: Training, folder: Path, function: Any = train) -> list[Trained]:
    return run(function, training, num_ranks=training.num_ranks, folder=folder)


def on_one_device(training: Training, folder: Path) -> Trained:
    """The same Trainer with ``strategy="auto"``."""
    single = replace(training, strategy="auto", num_ranks=1)
    return run(train, single, num_ranks=1, folder=folder)[0]


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "world"),
    [
        ("tspipe", 1, WORLDS[0]), ("tspipe", 2, WORLDS[1]), ("tspipe", 3, WORLDS[0]),
        ("tspipe_gpipe", 2, WORLDS[1]), ("tspipe_sequential", 2, WORLDS[0]),
    ],
)  # fmt: skip
def test_a_strategy_by_name(strategy: str, num_ranks: int, world: str, tmp_path: Path) -> None:
    training = Training(strategy=strategy, num_ranks=num_ranks, world=world)
    results = pipelined(training, tmp_path)
    assert_same(reference(training, strategy.removeprefix("tspipe_")), results[0])
    assert {result.global_step for result in results} == {8}


@pytest.mark.parametrize(
    ("schedule", "world"),
    [("tspipe", WORLDS[1]), ("gpipe", WORLDS[0]), ("sequential", WORLDS[1])],
)
def test_a_strategy_as_an_instance(schedule: str, world: str, tmp_path: Path) -> None:
    options = {"schedule": schedule, "num_microbatches": 2}
    training = Training("Moco-batch", "instance", options, world=world, optimizer="lars")
    assert_same(reference(training, schedule, 2), pipelined(training, tmp_path)[0])


KINDS = (
    "Byol-layer-2-lightly", "HookEma-batch-2", "Dino-group", "Tap-batch-True",
    "Distillation-group", "Classifier-batch", "Contrastive-group", "SimSiam-batch",
    "ComputedInputs-group",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    some_of(
        itertools.product(KINDS, (2, 3)),
        slow=[(case, 3) for case in KINDS[::3]],
        always=[(case, 2) for case in KINDS],
    ),
)
def test_every_kind_of_step(case: str, num_ranks: int, tmp_path: Path) -> None:
    training = Training(
        case, "instance", {"num_microbatches": 3}, num_ranks=num_ranks, optimizer="adamw"
    )
    assert_same(reference(training, num_microbatches=3), pipelined(training, tmp_path)[0])


def momentum_ema() -> list[Any]:
    return [MomentumEMA(0.9, student="student.0"), DelayedTeacherUpdate()]


def undelayed() -> list[Any]:
    return [DelayedTeacherUpdate(delay=0)]


def delayed_later() -> list[Any]:
    return [DelayedTeacherUpdate(start_step=3)]


def no_own_ema(module: Any) -> None:
    module.ema = "none"


@pytest.mark.parametrize(
    ("world", "num_ranks"),
    [(WORLDS[0], 2), (WORLDS[1], 1),
     pytest.param(WORLDS[0], 1, marks=pytest.mark.slow),
     pytest.param(WORLDS[1], 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_delay_on_one_device_is_delay_in_the_pipeline(
    world: str, num_ranks: int, tmp_path: Path
) -> None:
    for training in (
        Training(callbacks=delayed),
        Training("HookEma-group-2", callbacks=delayed),
        Training(callbacks=momentum_ema, change=no_own_ema),
        Training(callbacks=undelayed),
        Training("HookEma-batch-2", callbacks=undelayed),
        Training(callbacks=delayed_later),
    ):
        here = replace(training, num_ranks=num_ranks, world=world)
        options = {"num_microbatches": 1}
        expected = on_one_device(here, tmp_path)
        assert_same(
            expected, pipelined(replace(here, strategy="instance", options=options), tmp_path)[0]
        )


def test_an_undelayed_pipeline_is_the_vanilla_training(tmp_path: Path) -> None:
    training = Training("HookEma-group-1", "instance", {"num_microbatches": 1}, callbacks=undelayed)
    expected = reference(training, "gpipe")
    assert_same(expected, pipelined(training, tmp_path)[0])
    late = pipelined(replace(training, callbacks=delayed), tmp_path)[0]
    assert not torch.equal(torch.stack(late.losses), torch.stack(expected.losses))


@pytest.mark.parametrize(
    "trainer",
    [
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        {"limit_train_batches": 3},
        {"max_steps": 5, "max_epochs": None},
        {"limit_train_batches": 0.5, "max_epochs": 3},
        {"overfit_batches": 2},
    ],
    ids=str,
)
def test_what_the_trainer_is_told(trainer: dict[str, Any], tmp_path: Path) -> None:
    training = Training(
        "Byol-group-2-by hand", "instance", {"num_microbatches": 2}, num_ranks=3,
        optimizer="adamw", callbacks=delayed, trainer=trainer,
    )  # fmt: skip
    expected = on_one_device(training, tmp_path)
    results = pipelined(training, tmp_path)
    assert_same(expected, results[0])
    assert {result.global_step for result in results} == {expected.global_step}


def late_ema(module: Any) -> None:
    """The update is the last thing of the step."""
    module.ema = "none"
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        update_momentum(module.student[0], module.teacher, m=0.8)
        return loss

    module.training_step = training_step


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_ema_at_the_end_of_the_step(num_ranks: int, tmp_path: Path) -> None:
    training = Training(
        "Byol-group-2-by hand", "instance", {"num_microbatches": 2}, num_ranks=num_ranks,
        callbacks=delayed, change=late_ema, optimizer="adamw",
    )  # fmt: skip
    expected = on_one_device(training, tmp_path)
    assert_same(expected, pipelined(training, tmp_path)[0])
    in_time = on_one_device(replace(training, callbacks=undelayed), tmp_path)
    assert_same(expected, in_time)  # it was late already


def with_scheduler(module: Any) -> None:
    def configure() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}  # fmt: skip

    module.configure_optimizers = configure


def with_groups(module: Any) -> None:
    def configure() -> Any:
        decayed = [p for p in module.parameters() if p.ndim > 1]
        others = [p for p in module.parameters() if p.ndim <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3)

    module.configure_optimizers = configure


@pytest.mark.parametrize("change", [with_scheduler, with_groups])
def test_optimizers_and_schedulers(change: Any, tmp_path: Path) -> None:
    training = Training(callbacks=delayed, change=change)
    assert_same(on_one_device(training, tmp_path), pipelined(training, tmp_path)[0])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_loader_without_a_length(num_ranks: int, tmp_path: Path) -> None:
    sizes = ((5, 5, 4, 2), (5, 3))
    training = Training(num_ranks=num_ranks, sizes=sizes)
    results = pipelined(training, tmp_path, train_unsized)
    assert_same(reference(training), results[0])
    assert {result.global_step for result in results} == {6}


def test_torchruns_environment(tmp_path: Path) -> None:
    training = Training()
    results = run(train, training, num_ranks=2, folder=tmp_path, launcher="torchrun")
    assert_same(reference(training), results[0])


def test_what_other_ranks_see(tmp_path: Path) -> None:
    loss, data = pipelined(Training(), tmp_path)
    assert len(loss.losses) == len(data.losses) == 8
    assert set(loss.outputs) == {"Remote"}
    assert set(data.outputs) == {"dict"}
    torch.testing.assert_close(data.losses, loss.losses, rtol=0, atol=0)
    assert loss.metrics.keys() == data.metrics.keys() == {"train_loss"}
    assert loss.metrics == data.metrics


def in_bfloat16() -> None:
    torch.set_default_dtype(torch.float32)


def train_mixed(training: Training) -> Trained:
    in_bfloat16()
    return train(training)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mixed_precision(num_ranks: int, tmp_path: Path) -> None:
    training = Training(num_ranks=num_ranks, trainer={"precision": "bf16-mixed"})
    single = replace(training, strategy="auto", num_ranks=1, callbacks=delayed)
    expected = run(train_mixed, single, num_ranks=1, folder=tmp_path)[0]
    actual = run(train_mixed, training, num_ranks=num_ranks, folder=tmp_path)[0]
    torch.testing.assert_close(actual.losses, expected.losses, rtol=0.02, atol=0.02)
    assert {value.dtype for value in actual.weights.values()} == {torch.float32}
