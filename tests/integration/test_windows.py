"""Synchronous schedules: the batches of a window are the pipeline's, as on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision

from tests.integration.jobs import run, run_job
from tests.integration.trainings import RESUMING, Session, Trained, Training
from tests.integration.windows import (
    INTERLEAVED,
    ONE_F_ONE_B,
    SLOW,
    TO_AND_FRO,
    WINDOWS,
    Again,
    Alternates,
    Averages,
    AveragesInHooks,
    AveragesInSteps,
    ChangesItsMind,
    Classifier,
    Counts,
    Distils,
    Forgets,
    LearnsFromLarge,
    Leaves,
    LeavesBetween,
    Looks,
    Norms,
    ReadsGradients,
    Scales,
    Shifts,
    Speaks,
    Warms,
    both_of,
    by_schedule,
    in_halves,
    loader,
    of,
    same,
    train,
)

CASES = [
    (Classifier, of(4, (5,) * 8), 2, {ONE_F_ONE_B, INTERLEAVED, TO_AND_FRO}),
    (Classifier, of(3, (5, 5, 5, 5, 4), gradient_clip_val=0.1), 3, {ONE_F_ONE_B, TO_AND_FRO}),
    (Distils, of(3, (5, 5, 4, 5)), 2, {ONE_F_ONE_B, INTERLEAVED}),
    (Averages, of(2, (5, 5, 4, 5, 3)), 2, {ONE_F_ONE_B, TO_AND_FRO}),
    (Counts, of(2, (5, 5, 4)), 2, {ONE_F_ONE_B}),
    (Warms, of(2, (5, 5, 4, 5, 3)), 2, {ONE_F_ONE_B, TO_AND_FRO}),
    (Speaks, of(3, (4, 4, 3, 4), gradient_clip_val=0.1), 2, {ONE_F_ONE_B, INTERLEAVED}),
    (LeavesBetween, of(2, (5,) * 6), 2, {ONE_F_ONE_B}),
    (Again, of(3, (5, 5, 4, 5)), 2, {ONE_F_ONE_B, INTERLEAVED}),
    (Looks, of(2, (4, 4, 3)), 2, {ONE_F_ONE_B}),
    (Forgets, of(3, (5,) * 6), 2, {INTERLEAVED}),
    (Norms, of(4, (5,) * 5), 2, {TO_AND_FRO}),
    (Classifier, of(1, (5,) * 3), 2, set()),
    (Classifier, of(6, (5,) * 4), 4, set()),
    (Classifier, of(12, (5,) * 26), 2, set()),
    (Averages, of(4, (4,) * 7, gradient_clip_val=0.1), 3, set()),
    (Speaks, of(2, (4, 4, 3)), 3, set()),
]
"""What is trained, how, on how many ranks, and the schedules that are not slow tests."""


@pytest.mark.parametrize(("kind", "training", "num_ranks"), by_schedule(CASES))
def test_a_window_is_that_of_one_device(
    kind: type[Classifier], training: Training, num_ranks: int, tmp_path: Path
) -> None:
    same(*both_of(training, kind, tmp_path, num_ranks))


@pytest.mark.parametrize(
    ("kind", "training", "num_ranks"),
    [
        (Averages, of(2, (5, 5, 4, 5, 3), gradient_clip_val=0.1), 2),
        (Classifier, of(3, (5, 5, 5, 5, 4), gradient_clip_val=0.1), 3),
        (Warms, of(2, (5, 5, 4, 5, 3)), 2),
        (Again, of(3, (5, 5, 4, 5)), 2),
    ],
)
def test_backwards_in_halves(
    kind: type[Classifier], training: Training, num_ranks: int, tmp_path: Path
) -> None:
    same(*both_of(in_halves(training), kind, tmp_path, num_ranks))


def growing() -> list[Any]:
    return [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]


def test_windows_that_grow(tmp_path: Path) -> None:
    training = replace(WINDOWS, sizes=((5,) * 5,) * 3, callbacks=growing)
    same(*both_of(training, Classifier, tmp_path, 2))


def scaled(training: Training) -> Trained:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    session = Session(training, module=Classifier(), plugins=plugins)
    return session.fit(loader(training.sizes[0])).trained


def stages_of_teacher(training: Training) -> tuple[int, ...]:
    (sizes,) = set(training.sizes)
    module = LearnsFromLarge()
    Session(training, module=module, ignored=[RESUMING]).fit(loader(sizes, 2))
    return module.stages


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=SLOW)])
def test_a_large_teacher_has_several_stages_on_a_rank(num_ranks: int, tmp_path: Path) -> None:
    training = replace(of(4, (3, 3, 3, 3, 2)), options={"costs": "flops"}, num_ranks=num_ranks)
    options = {"schedule": "1f1b", "weights": "synchronous", "costs": "flops"}
    piped = replace(training, strategy="instance", options=options)
    found = run(stages_of_teacher, piped, num_ranks=num_ranks, folder=tmp_path / "stages")
    ranks = found[0]
    assert list(ranks) == sorted(ranks, reverse=True)
    assert len(ranks) > len(set(ranks))
    one = replace(training, strategy="auto", num_ranks=1, options={})
    (expected,) = run(train, one, LearnsFromLarge, num_ranks=1, folder=tmp_path / "alone")
    together = run(train, piped, LearnsFromLarge, num_ranks=num_ranks, folder=tmp_path / "together")
    same(expected, together)


@SLOW
def test_losses_of_a_window_are_scaled(tmp_path: Path) -> None:
    training = of(3, (5,) * 6)
    one = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(scaled, one, num_ranks=1, folder=tmp_path / "alone")
    same(expected, run(scaled, training, folder=tmp_path / "together"))


class Order(Callback):
    """Keeps what this rank's stage has done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        if engine is not None and engine.weights.trace is None:
            engine.weights.trace = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        reads = trainer.strategy.engine.weights.trace or []
        self.done += [
            f"{'F' if read.forward else 'B'}{read.batch}v{read.version}" for read in reads
        ]
        reads.clear()


def ordered(training: Training) -> list[str]:
    order = Order()
    Session(training, order, module=Classifier()).fit(loader(training.sizes[0], 1))
    return order.done


def test_forwards_run_ahead_within_a_window_only(tmp_path: Path) -> None:
    training = replace(of(3, (5,) * 7), sizes=((5,) * 7,))
    first, second = run(ordered, training, folder=tmp_path)
    # The first step of a training is watched from the second one on.
    assert first[-8:] == ["F3v1", "B3v1", "F4v1", "B4v1", "F5v1", "B5v1", "F6v2", "B6v2"]
    assert second[-8:] == ["F3v1", "F4v1", "B3v1", "F5v1", "B4v1", "B5v1", "F6v2", "B6v2"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (AveragesInSteps, "training_step changes parameters of networks in each batch"),
        (AveragesInHooks, "was changed between two updates"),
        (Scales, "a hook has changed an attribute of a network (its mode, say)"),
        (Leaves, "a hook has changed an attribute of a network (its mode, say)"),
        (Shifts, "'teacher.0.1.running_mean' was changed between two updates"),
        (Alternates, "in windows of accumulated batches: where a window begins"),
    ],
)
def test_what_changes_within_a_window_is_refused(
    kind: type[Classifier], words: str, tmp_path: Path
) -> None:
    job = run_job(train, of(2, (5,) * 4), kind, folder=tmp_path)
    assert any(words in error for error in job.errors), job.output


@pytest.mark.parametrize(
    ("kind", "strategy", "words"),
    [
        (ReadsGradients, INTERLEAVED, "a gradient is read in the middle of a window"),
        (ChangesItsMind, ONE_F_ONE_B, "an update comes while"),
        (ChangesItsMind, TO_AND_FRO, "an update comes while"),
    ],
)
def test_what_a_window_has_not_yet_is_refused(
    kind: type[Classifier], strategy: str, words: str, tmp_path: Path
) -> None:
    job = run_job(train, replace(of(4, (5,) * 8), strategy=strategy), kind, folder=tmp_path)
    assert any(words in error for error in job.errors), job.output


def test_a_short_window_is_told(tmp_path: Path) -> None:
    job = run_job(train, of(2, (5,) * 2), Classifier, folder=tmp_path)
    assert job.errors == ["", ""], job.output
    assert job.output.count("busy for 67 % of the time, one of 8 batches for 89 %") == 1
