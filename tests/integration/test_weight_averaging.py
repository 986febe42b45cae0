"""Lightning's ``WeightAveraging``: averages lie with the stages, and are those of one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint

from lightning_tspipe import FreezeAndRepack
from tests.integration.comparing import alone
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Training, delayed
from tests.integration.weight_averaging import (
    Averaging,
    Found,
    fit,
    fit_blocks,
    fit_checked,
    fit_heads,
    fit_to,
    fit_twice,
    fit_with_found_rate,
)

SIZES = ((5, 5, 3, 4), (5, 5, 3, 4))
EMA = Averaging()
MEAN = Averaging("WeightAveraging", {"use_buffers": False})
SLOW = pytest.mark.slow


def saves() -> list[Any]:
    return [ModelCheckpoint("kept", "{epoch}-{step}", save_top_k=-1, every_n_train_steps=3)]


def saves_each_epoch() -> list[Any]:
    """What is saved behind a fit has the average in place of the weights, as in Lightning."""
    return [ModelCheckpoint("kept", "{epoch}-{step}", save_top_k=-1, every_n_train_steps=4)]


def saves_and_delays() -> list[Any]:
    return [*saves(), *delayed()]


def training(case: str = "Classifier-batch", **options: Any) -> Training:
    """With whole batches: BatchNorm."""
    made = {"num_microbatches": 1, "schedule": "gpipe", **options}
    return Training(case, "instance", made, sizes=SIZES, callbacks=saves,
                    trainer={"enable_checkpointing": True})  # fmt: skip


def assert_same(actual: Found, expected: Found) -> None:
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
    assert actual.metrics == [pytest.approx(each, rel=1e-9) for each in expected.metrics]
    assert actual.saved.keys() == expected.saved.keys()
    torch.testing.assert_close(actual.saved, expected.saved, **CLOSE)


def assert_spread(ranks: list[Found]) -> None:
    """No rank has all of the average, and all of them together have."""
    number = len(ranks[0].saved["after"]["state_dict"])
    assert all(0 < rank.missing < number for rank in ranks)
    assert sum(number - rank.missing for rank in ranks) >= number


def calls_twice_later(module: Any) -> None:
    """In the second epoch its step is another one: stages are placed anew."""
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        return loss + module.net(0.5 * batch[0]).square().mean() if module.current_epoch else loss

    module.training_step = training_step


WINDOW = {"trainer": {"accumulate_grad_batches": 2, "enable_checkpointing": True}}
WITHIN = {"trainer": {**WINDOW["trainer"], "val_check_interval": 1}}
"""Validations between batches whose update is still to come."""
CASES: dict[str, tuple[Training, Averaging]] = {
    "late": (replace(training("Byol-batch-1-by hand", schedule="tspipe"),
                     callbacks=saves_and_delays), EMA),
    "hook": (training("HookEma-batch-1"), EMA),
    "mean": (training(), MEAN),
    "epochs": (training(), Averaging(arguments={
        "decay": 0.3, "update_every_n_steps": 3, "update_starting_at_epoch": 0})),
    "device": (training(), Averaging(arguments={"decay": 0.5, "device": "cpu"})),
    "other world": (replace(training(), world="pytorch_lightning", callbacks=list), EMA),
    "three": (replace(training("Classifier-group"), num_ranks=3), EMA),
    "1f1b": (replace(training(schedule="1f1b", weights="synchronous"), **WITHIN), EMA),
    "frozen": (replace(training("Distillation-group", schedule="1f1b", weights="synchronous"),
                       **WITHIN), Averaging(arguments={"decay": 0.9})),
    "frozen and ahead": (training("Distillation-group", schedule="tspipe"),
                         Averaging(arguments={"decay": 0.9})),
    "another step": (replace(training("Classifier-group"), change=calls_twice_later), EMA),
    "interleaved": (replace(training(schedule="interleaved"), **WINDOW), MEAN),
    "zbv": (replace(training(schedule="zbv"), **WINDOW), EMA),
}  # fmt: skip


def test_an_average_is_that_of_one_device(tmp_path: Path) -> None:
    (expected,) = run(fit, alone(training()), EMA, num_ranks=1, folder=tmp_path / "alone")
    ranks = run(fit, training(), EMA, folder=tmp_path / "together")
    assert_same(ranks[0], expected)
    assert_spread(ranks)
    weights = expected.saved["after"]["current_model_state"]
    averages = expected.saved["epoch=1-step=6"]["state_dict"]
    assert len(expected.saved) == 3
    assert any(not torch.equal(averages[name], value) for name, value in weights.items())


@SLOW
@pytest.mark.parametrize("name", CASES)
def test_other_trainings_and_averages(name: str, tmp_path: Path) -> None:
    case, by = CASES[name]
    (expected,) = run(fit, alone(case), by, num_ranks=1, folder=tmp_path / "alone")
    ranks = run(fit, case, by, num_ranks=case.num_ranks, folder=tmp_path / "together")
    assert_same(ranks[0], expected)
    assert_spread(ranks)


@SLOW
@pytest.mark.parametrize("by", [EMA, MEAN], ids=["ema", "mean"])
def test_going_on_with_other_stages(by: Averaging, tmp_path: Path) -> None:
    """From a pipeline's file on one device, and the reverse."""
    # The same batches in each epoch: their loader has no state.
    repeated = {"enable_checkpointing": True, "max_epochs": 2}
    case = replace(training(), sizes=SIZES[:1], trainer=repeated, callbacks=saves_each_epoch)
    (whole,) = run(fit, alone(case), by, num_ranks=1, folder=tmp_path / "whole")
    for name, first, second in (("shrinks", case, alone(case)), ("grows", alone(case), case)):
        folder = tmp_path / name
        run(fit_to, first, by, 1, num_ranks=first.num_ranks, folder=folder)
        path = str(folder / "kept" / "epoch=0-step=4.ckpt")
        later = run(fit, second, by, path, num_ranks=second.num_ranks, folder=folder / "on")[0]
        torch.testing.assert_close(later.losses, whole.losses[4:], **CLOSE)
        torch.testing.assert_close(later.weights, whole.weights, **CLOSE)
        torch.testing.assert_close(later.saved["after"], whole.saved["after"], **CLOSE)
        assert later.metrics == [pytest.approx(whole.metrics[1], rel=1e-9)]


@SLOW
def test_validating_apart_and_fitting_again(tmp_path: Path) -> None:
    case = training()
    ((expected, metrics),) = run(
        fit_twice, alone(case), EMA, num_ranks=1, folder=tmp_path / "alone"
    )
    ranks = run(fit_twice, case, EMA, folder=tmp_path / "together")
    assert_same(ranks[0][0], expected)
    for _, found in ranks:
        assert [one[0] for one in found] == [pytest.approx(one[0]) for one in metrics]


@SLOW
def test_averages_begin_with_the_weights_of_the_first_rank(tmp_path: Path) -> None:
    """A sanity check looks at them before the first update."""
    case = training("Classifier-group")
    seeds = (1, 2)
    (expected,) = run(fit_checked, alone(case), EMA, seeds, num_ranks=1, folder=tmp_path / "alone")
    ranks = run(fit_checked, case, EMA, seeds, folder=tmp_path / "together")
    assert_same(ranks[0], expected)


@SLOW
def test_replicas_average_alike(tmp_path: Path) -> None:
    case = replace(training("Classifier-group", num_stages=2), num_ranks=4)
    (expected,) = run(
        fit, alone(training("Classifier-group")), EMA, num_ranks=1, folder=tmp_path / "alone"
    )
    ranks = run(fit, case, EMA, num_ranks=4, folder=tmp_path / "together")
    # Its loaders have no samplers: both replicas get the batches of one device.
    assert_same(ranks[0], expected)
    assert [rank.missing for rank in ranks[:2]] == [rank.missing for rank in ranks[2:]]


@SLOW
def test_blocks_and_heads_are_refused(tmp_path: Path) -> None:
    for number, (function, arguments) in enumerate(((fit_blocks, ("dpu",)), (fit_heads, ()))):
        job = run_job(function, 2, *arguments, folder=tmp_path / str(number), seconds=60)
        assert all(rank.exit_code == 1 for rank in job.ranks), job.output
        words = "ConfigurationError: WeightAveraging with heads or blocks"
        assert any(error.startswith(words) for error in job.errors), job.output


def finds_rate() -> list[Any]:
    return [LearningRateFinder(1e-4, 1.0, num_training_steps=14)]


@SLOW
def test_a_learning_rate_is_found_beside_an_average(tmp_path: Path) -> None:
    case = replace(training("Classifier-group"), callbacks=finds_rate, sizes=((4,) * 6,) * 3)
    ((expected, rate),) = run(
        fit_with_found_rate, alone(case), EMA, num_ranks=1, folder=tmp_path / "alone"
    )
    ranks = run(fit_with_found_rate, case, EMA, folder=tmp_path / "together")
    assert rate != 1e-3
    assert [found for _, found in ranks] == [rate, rate]
    assert_same(ranks[0][0], expected)


def of_several(averages: Any, weights: Any, _number: Any) -> None:
    torch._foreach_lerp_(averages, weights, 0.5)


def freezes() -> list[Any]:
    return [FreezeAndRepack(num_active=1)]


REFUSED: dict[str, tuple[Training, Averaging, str]] = {
    "late updates": (training(schedule="1f1b"), EMA, "weights='synchronous'"),
    "several at once": (
        training(), Averaging("WeightAveraging", {"multi_avg_fn": of_several}), "Use avg_fn",
    ),
    "shards": (
        training(save_distributed_checkpoint=True), EMA, "save_distributed_checkpoint=False",
    ),
    "freezing": (replace(training(), callbacks=freezes), EMA, "Use MomentumEMA"),
}  # fmt: skip


@SLOW
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    case, by, words = REFUSED[name]
    job = run_job(fit, case, by, folder=tmp_path, seconds=60)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert any(
        error.startswith("ConfigurationError: ") and "WeightAveraging" in error and words in error
        for error in job.errors
    ), job.output
