"""What Lightning does around the steps: evaluation, checkpoints, loggers, callbacks, resuming."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from lightning_tspipe import DelayedTeacherUpdate, KNNEvaluator
from lightning_tspipe.cli.modules import measure
from tests.choosing import some_of
from tests.ecosystem.methods import METHODS
from tests.exactness.modules import images, labels, make_epochs
from tests.integration.comparing import both
from tests.integration.jobs import run
from tests.integration.trainings import (
    CLOSE,
    RESUMING,
    SIZES,
    Epochs,
    Session,
    Trained,
    Training,
    build_module,
    lightning_module,
    train,
)

TRAINING = Training("Classifier-batch", "instance", {"num_microbatches": 1})
BYOL = Training("Byol-batch-2-by hand", "instance", {"num_microbatches": 1})


def add_validation(module: Any) -> None:
    """A validation step that calls the student and logs."""

    def validation_step(batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = module.net(x)
        module.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        module.log("val_acc", (logits.argmax(1) == y).double().mean())

    module.validation_step = validation_step
    module.test_step = validation_step
    module.predict_step = lambda batch, batch_idx: module.net(batch[0])


def validation_batches() -> Epochs:
    return Epochs([[(images(5, seed), labels(5, seed)) for seed in range(50, 53)]])


def fit_and_validate(training: Training) -> tuple[Trained, Any, Any]:
    it = Session(training, change=add_validation).fit(validation=validation_batches())
    return it.trained, it.validate(validation_batches()), it.test(validation_batches())


@pytest.mark.parametrize(
    ("num_ranks", "world"),
    some_of(
        itertools.product([1, 2, 3], ["lightning.pytorch", "pytorch_lightning"]),
        slow=[(1, "pytorch_lightning"), (2, "lightning.pytorch"), (3, "lightning.pytorch")],
        always=[(1, "lightning.pytorch"), (2, "pytorch_lightning"), (3, "pytorch_lightning")],
    ),
)
def test_validation_is_as_on_one_device(num_ranks: int, world: str, tmp_path: Path) -> None:
    training = replace(TRAINING, world=world, trainer={"num_sanity_val_steps": 2})
    expected, results = both(fit_and_validate, training, tmp_path, num_ranks)
    for trained, _, _ in results:
        assert trained.metrics.keys() >= {"train_loss", "val_loss", "val_acc"}
        assert trained.metrics == pytest.approx(expected[0].metrics, rel=1e-9)
    _, after, tested = results[0]
    assert after[0] == pytest.approx(expected[1][0], rel=1e-9)
    assert tested[0] == pytest.approx(expected[2][0], rel=1e-9)
    torch.testing.assert_close(results[0][0].weights, expected[0].weights, **CLOSE)


def knn_decides() -> list[Any]:
    return [
        EarlyStopping("train_loss", patience=5, check_on_train_epoch_end=True),
        *knn(),
        ModelCheckpoint(dirpath="saved", monitor="val_knn_top1", mode="max",
                        save_on_train_epoch_end=True),
    ]  # fmt: skip


def knn() -> list[Any]:
    bank = [(images(6, seed), labels(6, seed)) for seed in range(60, 63)]
    queries = [(images(4, seed), labels(4, seed)) for seed in range(70, 73)]
    return [KNNEvaluator(bank, queries, features="student", k=3), DelayedTeacherUpdate()]


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_knn_accuracy_is_as_on_one_device(num_ranks: int, tmp_path: Path) -> None:
    expected, results = both(train, replace(BYOL, callbacks=knn), tmp_path, num_ranks)
    assert expected.metrics.keys() >= {"val_knn_top1", "val_knn_top5"}
    assert results[0].metrics == pytest.approx(expected.metrics, rel=1e-9)
    torch.testing.assert_close(results[0].losses, expected.losses, **CLOSE)


def fit_by_knn(training: Training) -> str:
    return str(Session(training).fit().trainer.checkpoint_callback.best_model_path)


@pytest.mark.slow
def test_the_best_model_by_knn_accuracy(tmp_path: Path) -> None:
    training = replace(BYOL, callbacks=knn_decides, trainer={"enable_checkpointing": True})
    expected, results = both(fit_by_knn, training, tmp_path)
    assert {Path(path).name for path in results} == {Path(expected).name}


def delayed_checkpoint() -> list[Any]:
    return [DelayedTeacherUpdate(), ModelCheckpoint(dirpath="saved", filename="last")]


def fit_with_checkpoint(training: Training) -> Trained:
    return train(replace(training, trainer={"enable_checkpointing": True}))


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_checkpoint_is_that_of_one_device(optimizer: str, tmp_path: Path) -> None:
    training = replace(BYOL, callbacks=delayed_checkpoint, optimizer=optimizer)
    both(fit_with_checkpoint, training, tmp_path, 3)
    expected, actual = (
        torch.load(tmp_path / name / "saved/last.ckpt", weights_only=False)
        for name in ("alone", "together")
    )
    assert actual.keys() - expected.keys() == {"lightning_tspipe"}
    assert list(actual["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(actual["state_dict"], expected["state_dict"], **CLOSE)
    ours, theirs = actual["optimizer_states"][0], expected["optimizer_states"][0]
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], **CLOSE)
    for key in ("epoch", "global_step", "loops", "lr_schedulers"):
        assert actual[key] == expected[key]
    module = lightning_module(training.case, training.world, optimizer)
    module.load_state_dict(actual["state_dict"])


def resume(training: Training, path: str) -> Trained:
    it = Session(training, ignored=[RESUMING])
    for _ in range(training.sizes.index(training.sizes[-1])):
        list(it.loader)
    return it.fit(ckpt_path=path).trained


def save_first_epoch() -> list[Any]:
    return [
        DelayedTeacherUpdate(),
        ModelCheckpoint(dirpath="saved", filename="{epoch}", save_top_k=-1, every_n_epochs=1),
    ]


@pytest.mark.parametrize(
    ("source", "num_ranks"),
    some_of(
        itertools.product(["alone", "together"], [1, 2]),
        slow=[("alone", 1), ("together", 2)],
        always=[("alone", 2), ("together", 1)],
    ),
)
def test_resuming_after_an_epoch(source: str, num_ranks: int, tmp_path: Path) -> None:
    training = replace(
        BYOL, callbacks=save_first_epoch, optimizer="adamw", sizes=(*SIZES, (4, 4, 3, 1))
    )
    whole, _ = both(fit_with_checkpoint, training, tmp_path)
    path = str(tmp_path / source / "saved" / "epoch=1.ckpt")
    again = replace(training, num_ranks=num_ranks, callbacks=list)
    resumed = run(resume, again, path, num_ranks=num_ranks, folder=tmp_path)[0]
    assert len(resumed.losses) == 4
    torch.testing.assert_close(resumed.losses, whole.losses[-4:], **CLOSE)
    torch.testing.assert_close(resumed.weights, whole.weights, **CLOSE)


def monitors() -> list[Any]:
    return [
        EarlyStopping("val_loss", patience=1, min_delta=10.0),
        ModelCheckpoint(dirpath="saved", monitor="val_loss", save_top_k=2, filename="{epoch}"),
        ModelCheckpoint(dirpath="steps", monitor="train_loss", every_n_train_steps=2,
                        filename="{step}", save_top_k=2),
    ]  # fmt: skip


def plateau(module: Any) -> None:
    def configure() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=10.0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }

    module.configure_optimizers = configure


def fit_with_monitors(training: Training) -> tuple[Trained, int, list[Any], float]:
    it = Session(training, change=add_validation).fit(validation=validation_batches())
    callbacks = it.trainer.checkpoint_callbacks
    best = [(c.best_model_path, sorted(c.best_k_models)) for c in callbacks]
    rate = it.trainer.optimizers[0].param_groups[0]["lr"]
    return it.trained, it.trainer.current_epoch, best, rate


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_callbacks_that_decide_by_metrics(num_ranks: int, tmp_path: Path) -> None:
    training = replace(
        TRAINING, callbacks=monitors, change=plateau, sizes=SIZES * 3,
        trainer={"enable_checkpointing": True},
    )  # fmt: skip
    expected, results = both(fit_with_monitors, training, tmp_path, num_ranks)
    assert expected[1] == 2  # of 6
    assert expected[3] < 0.1
    for trained, epoch, best, rate in results:
        assert epoch == expected[1]
        assert rate == expected[3]
        assert [[Path(p).name for p in (first, *others)] for first, others in best] == [
            [Path(p).name for p in (first, *others)] for first, others in expected[2]
        ]
        assert trained.global_step == expected[0].global_step
    names = [
        sorted(p.name for p in (tmp_path / place / folder).iterdir())
        for place in ("alone", "together")
        for folder in ("saved", "steps")
    ]
    assert names[:2] == names[2:]


def fit_with_logger(training: Training) -> None:
    Session(
        training, LearningRateMonitor("step"), change=add_validation,
        logger=CSVLogger(".", name="", version="log"), enable_progress_bar=True,
        enable_model_summary=True,
    ).fit(validation=validation_batches())  # fmt: skip


def test_loggers_and_progress_bars(tmp_path: Path) -> None:
    both(fit_with_logger, TRAINING, tmp_path)
    rows = []
    for name in ("alone", "together"):
        with (tmp_path / name / "log/metrics.csv").open() as file:
            rows.append(list(csv.DictReader(file)))
    expected, actual = rows
    assert expected
    assert len(expected) == len(actual)
    for theirs, ours in zip(expected, actual, strict=True):
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            assert (value == "") == (ours[key] == ""), key
            if value:
                assert float(ours[key]) == pytest.approx(float(value), rel=1e-6)
    loss, data = ((tmp_path / f"together/output-{rank}.txt").read_text() for rank in (0, 1))
    assert "val_loss" in loss
    assert "Epoch 1" in loss
    assert "Epoch" not in data


def fit_twice(training: Training) -> tuple[Trained, Trained]:
    first = Session(training).fit()
    trained = first.trained
    return trained, Session(training, module=first.module).fit(first.loader).trained


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_second_fit_goes_on(num_ranks: int, tmp_path: Path) -> None:
    expected, results = both(fit_twice, TRAINING, tmp_path, num_ranks)
    for theirs, ours in zip(expected, results[0], strict=True):
        torch.testing.assert_close(ours.losses, theirs.losses, **CLOSE)
        torch.testing.assert_close(ours.weights, theirs.weights, **CLOSE)
        assert ours.meta == []


def fit_more(training: Training) -> Trained:
    """The same Trainer goes on."""
    it = Session(training).fit()
    it.trainer.fit_loop.max_epochs = 4
    return it.fit().trained


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_trainer_fits_twice(num_ranks: int, tmp_path: Path) -> None:
    expected, results = both(fit_more, TRAINING, tmp_path, num_ranks)
    torch.testing.assert_close(results[0].losses, expected.losses, **CLOSE)
    torch.testing.assert_close(results[0].weights, expected.weights, **CLOSE)


def predict(training: Training) -> Any:
    it = Session(training, change=add_validation)
    it.validate(validation_batches())
    return it.predict(validation_batches())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_without_a_fit(num_ranks: int, tmp_path: Path) -> None:
    expected, results = both(predict, TRAINING, tmp_path, num_ranks)
    torch.testing.assert_close(results[0], expected, **CLOSE)


def fit_lightly(training: Training) -> Trained:
    """The example module of lightly's documentation, as it stands."""
    module = METHODS["byol"].make(training.world).double()
    batches = [
        ((images(4, seed, 16), images(4, seed + 9, 16)), labels(4, seed), ["a.png"] * 4)
        for seed in range(6)
    ]
    module.student_names = ["backbone", "projection_head", "prediction_head"]
    module.teacher_names = ["backbone_momentum", "projection_head_momentum"]
    return Session(training, module=module).fit(Epochs([batches])).trained


def lightly_delay() -> list[Any]:
    teacher = ["backbone_momentum", "projection_head_momentum"]
    return [DelayedTeacherUpdate(teacher=teacher)]


def test_lightlys_byol(tmp_path: Path) -> None:
    training = replace(
        BYOL, world="pytorch_lightning", callbacks=lightly_delay, sizes=((), ()),
    )  # fmt: skip
    expected, results = both(fit_lightly, training, tmp_path)
    assert len(expected.losses) == 12
    torch.testing.assert_close(results[0].losses, expected.losses, **CLOSE)
    torch.testing.assert_close(results[0].weights, expected.weights, **CLOSE)


def save_plan(training: Training, path: str) -> None:
    """Measure the step on one device, and plan for two."""
    module = build_module(training)  # and no Trainer, whose strategy would read the plan
    loader = Epochs(make_epochs(module, training.sizes))
    profile = measure(module, loader, accelerator="cpu", student=module.student_names)
    plan = profile.plan(2, schedule="gpipe", num_microbatches=2)
    Path(path).write_text(plan.to_json(), encoding="utf-8")


def test_a_saved_plan_is_carried_out(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    training = replace(TRAINING, case="Classifier-group", options={"plan": str(path)})
    run(save_plan, replace(training, num_ranks=1), str(path), num_ranks=1, folder=tmp_path)
    expected, results = both(train, training, tmp_path)
    torch.testing.assert_close(results[0].losses, expected.losses, **CLOSE)
    torch.testing.assert_close(results[0].weights, expected.weights, **CLOSE)
