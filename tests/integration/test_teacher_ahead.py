"""Teachers that run ahead of updates, in windows: nothing changes but when a device works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from lightning_tspipe import DelayedTeacherUpdate, TSPipeStrategy
from lightning_tspipe.ir.action import Op
from tests.integration.jobs import run, run_job
from tests.integration.trainings import RESUMING, Session, Trained, Training, Unsized
from tests.integration.windows import (
    INTERLEAVED,
    ONE_F_ONE_B,
    SLOW,
    TO_AND_FRO,
    WINDOWS,
    Averages,
    AveragesInSteps,
    Classifier,
    Distils,
    Warms,
    batches,
    by_schedule,
    in_halves,
    loader,
    of,
    same,
)

Ran = list[list[int]]
"""For each step, the distances of the batches whose teacher ran."""


class Watch(Callback):
    """Keeps of which batches the teacher ran on this rank."""

    def __init__(self) -> None:
        self.found: Ran = []

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            program = engine._step[2].program
            actions = program.ranks[engine.rank]
            self.found.append([a.batch for a in actions if a.op is Op.TEACHER])


class Changes(Distils):
    """Its teacher is frozen at first, and changed behind the update of a batch."""

    at = 5

    def on_train_batch_end(self, _outputs: Any, _batch: Any, index: int) -> None:
        if index == self.at:
            self.change()

    @torch.no_grad()
    def change(self) -> None:
        for own, mean in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            mean.lerp_(own, 0.5)


class ChangesInSecret(Changes):
    """The same in a way that leaves no trace but values."""

    def change(self) -> None:
        for own, mean in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            mean.data.mul_(0.5).add_(own.data, alpha=0.5)


class ChangesEveryEpoch(Distils):
    """Its teacher becomes its student where an epoch begins."""

    def on_train_epoch_start(self) -> None:
        self.teacher.load_state_dict(self.student.state_dict())


class LeavesTraining(Changes):
    """Its teacher's BatchNorm is in eval mode from then on."""

    def change(self) -> None:
        self.teacher.eval()


class Late(Averages):
    """An averaged teacher that is one update late in whole windows."""

    start = 0

    def configure_callbacks(self) -> Any:
        return [
            super().configure_callbacks(),
            DelayedTeacherUpdate(windows=True, start_step=self.start),
        ]


class LateFromTheThird(Late):
    """The same from the third update on."""

    start = 2


class Newest(Distils):
    """A frozen teacher of which its user doesn't want to know that it may run ahead."""

    def configure_callbacks(self) -> Any:
        return [DelayedTeacherUpdate(delay=0)]


def train(training: Training, kind: type[Classifier], **arguments: Any) -> tuple[Trained, Ran]:
    (sizes,) = set(training.sizes)
    watch = Watch()
    session = Session(training, watch, module=kind(), ignored=[RESUMING])
    trained = session.fit(loader(sizes, len(training.sizes)), **arguments).trained
    return trained, watch.found


def compared(training: Training, kind: type[Classifier], folder: Path, num_ranks: int) -> list[Ran]:
    """Train on one device and on several; of which batches teachers ran on each rank."""
    one = replace(training, strategy="auto", num_ranks=1)
    ((expected, _),) = run(train, one, kind, num_ranks=1, folder=folder / "alone")
    piped = replace(training, num_ranks=num_ranks)
    ranks = run(train, piped, kind, num_ranks=num_ranks, folder=folder / "together")
    same(expected, [trained for trained, _ in ranks])
    return [found for _, found in ranks]


def ahead_of_updates(training: Training, found: Ran) -> list[int]:
    """The steps that ran a teacher of the next window."""
    every, length = training.trainer["accumulate_grad_batches"], len(training.sizes[0])
    return [
        step
        for step, offsets in enumerate(found)
        if any((step % length + o) // every > step % length // every for o in offsets)
    ]


CASES = [
    (Distils, of(3, (5,) * 11), 2, {ONE_F_ONE_B, INTERLEAVED, TO_AND_FRO}),
    (Late, of(3, (5,) * 11), 2, {ONE_F_ONE_B, INTERLEAVED, TO_AND_FRO}),
    (Late, of(1, (5,) * 5), 2, {ONE_F_ONE_B}),
    (LateFromTheThird, of(2, (5,) * 8), 2, {ONE_F_ONE_B}),
    (Late, of(4, (5, 5, 4) * 5, gradient_clip_val=0.1), 3, set()),
    (Late, of(9, (5,) * 20), 2, set()),
    (Late, of(2, (5,) * 7), 1, {ONE_F_ONE_B, TO_AND_FRO}),
    (Distils, of(1, (5,) * 6), 3, set()),
    (Distils, of(5, (5, 4, 5) * 6, gradient_clip_val=0.1), 4, set()),
    (Distils, of(12, (5,) * 30), 2, set()),
    (Changes, of(2, (5,) * 11), 2, {ONE_F_ONE_B, TO_AND_FRO}),
    (ChangesEveryEpoch, of(2, (5,) * 7), 2, {ONE_F_ONE_B}),
    (LeavesTraining, of(2, (5,) * 11), 2, {ONE_F_ONE_B}),
    (Warms, of(2, (5,) * 9), 2, {INTERLEAVED}),
    (Newest, of(3, (5,) * 7), 2, set()),
]


@pytest.mark.parametrize(("kind", "training", "num_ranks"), by_schedule(CASES))
def test_it_is_that_of_one_device(
    kind: type[Classifier], training: Training, num_ranks: int, tmp_path: Path
) -> None:
    ranks = compared(training, kind, tmp_path, num_ranks)
    ahead = {step for found in ranks for step in ahead_of_updates(training, found)}
    assert bool(ahead) == (kind is not Newest)
    if kind in {Changes, LeavesTraining}:
        assert ahead <= {2, 3, 4, 5}  # not in the first window, and not behind the change


@pytest.mark.parametrize(("kind", "num_ranks"), [(Late, 3), (Distils, 2), (Changes, 2)])
def test_backwards_in_halves(kind: type[Classifier], num_ranks: int, tmp_path: Path) -> None:
    training = in_halves(of(3, (5,) * 11))
    ranks = compared(training, kind, tmp_path, num_ranks)
    assert any(ahead_of_updates(training, found) for found in ranks)


@pytest.mark.parametrize("strategy", [ONE_F_ONE_B, pytest.param(INTERLEAVED, marks=SLOW)])
def test_a_change_that_only_its_device_sees_is_told_before_the_update(
    strategy: str, tmp_path: Path
) -> None:
    """A host that asked in each window would wait for its device in each window."""
    training = replace(of(2, (5,) * 11), strategy=strategy)
    job = run_job(train, training, ChangesInSecret, folder=tmp_path)
    told = [error for error in job.errors if "values were changed through .data" in error]
    assert told, job.output
    assert "DelayedTeacherUpdate(delay=0)" in told[0]
    assert "in training step 4" in job.output  # whose window's update would have been wrong


def streamed(training: Training, kind: type[Classifier]) -> tuple[Trained, Ran]:
    watch = Watch()
    session = Session(training, watch, module=kind(), ignored=[RESUMING, ".*__len__.*"])
    trained = session.fit(Unsized(batches(training.sizes[0], len(training.sizes)))).trained
    return trained, watch.found


@pytest.mark.parametrize("kind", [Distils, pytest.param(Late, marks=SLOW)])
@pytest.mark.parametrize("trainer", [{}, {"max_steps": 5}, {"limit_train_batches": 7}])
def test_loaders_without_a_length_and_ends_on_the_way(
    kind: type[Classifier], trainer: dict[str, Any], tmp_path: Path
) -> None:
    training = of(2, (5,) * 9, **trainer)
    one = replace(training, strategy="auto", num_ranks=1)
    ((expected, _),) = run(streamed, one, kind, num_ranks=1, folder=tmp_path / "alone")
    ranks = run(streamed, training, kind, folder=tmp_path / "together")
    same(expected, [trained for trained, _ in ranks])


def grown() -> list[Any]:
    return [GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})]


@pytest.mark.parametrize("kind", [Late, pytest.param(Distils, marks=SLOW)])
def test_windows_that_grow(kind: type[Classifier], tmp_path: Path) -> None:
    training = replace(WINDOWS, sizes=((5,) * 9,) * 3, callbacks=grown)
    compared(training, kind, tmp_path, 2)


def validated(training: Training, kind: type[Classifier], **arguments: Any) -> Trained:
    module = kind()

    def validation_step(batch: Any) -> None:
        module.log("val", module.loss(*batch), batch_size=len(batch[0]))

    module.validation_step = validation_step  # type: ignore[method-assign]
    session = Session(training, module=module, ignored=[RESUMING], val_check_interval=4)
    (sizes,) = set(training.sizes)
    return session.fit(loader(sizes), validation=loader((5, 5)), **arguments).trained


@SLOW
@pytest.mark.parametrize("kind", [Distils, Late])
def test_a_validation_between_two_windows(kind: type[Classifier], tmp_path: Path) -> None:
    training = of(2, (5,) * 9)
    one = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(validated, one, kind, num_ranks=1, folder=tmp_path / "alone")
    same(expected, run(validated, training, kind, folder=tmp_path / "together"))


def by(*cuts: int) -> TSPipeStrategy:
    partition = {"student": list(cuts), "teacher": list(cuts)}
    return TSPipeStrategy(schedule="1f1b", weights="synchronous", partition=partition)


def resumed(training: Training, kind: type[Classifier]) -> Trained:
    """Train a part and save; then go on with other stages."""
    (sizes,) = set(training.sizes)
    saver = ModelCheckpoint("saved", "half", every_n_train_steps=3)
    ends = {"max_steps": 3, "enable_checkpointing": True}
    Session(training, saver, module=kind(), strategy=by(9, 8), **ends).fit(loader(sizes))
    ignored = [RESUMING, "You.re resuming from a checkpoint that ended", "the run was planned"]
    session = Session(training, module=kind(), ignored=ignored, strategy=by(8, 9))
    return session.fit(loader(sizes), ckpt_path="saved/half.ckpt").trained


def test_other_stages_go_on_with_a_frozen_teacher(tmp_path: Path) -> None:
    training = of(2, (5,) * 9)
    one = replace(training, strategy="auto", num_ranks=1)
    ((expected, _),) = run(train, one, Distils, num_ranks=1, folder=tmp_path / "alone")
    first, *others = run(resumed, training, Distils, folder=tmp_path / "together")
    same(expected, [replace(first, losses=expected.losses[:6] + first.losses), *others])


def test_other_stages_do_not_go_on_with_a_late_one(tmp_path: Path) -> None:
    job = run_job(resumed, of(2, (5,) * 9), Late, folder=tmp_path)
    assert all(rank.exit_code for rank in job.ranks)
    assert "doesn't hold what the late teacher" in job.output


class LateInSteps(AveragesInSteps):
    """A late teacher that the step averages."""

    def configure_callbacks(self) -> Any:
        return [DelayedTeacherUpdate(windows=True)]


@pytest.mark.parametrize(
    ("kind", "strategy", "message"),
    [
        (Late, "tspipe", "under schedule='tspipe' no window is in the pipeline"),
        (LateInSteps, ONE_F_ONE_B, "training_step itself changes parameters of networks"),
    ],
)
def test_where_none_can_be_late(
    kind: type[Classifier], strategy: str, message: str, tmp_path: Path
) -> None:
    job = run_job(train, replace(of(1, (5,) * 3), strategy=strategy), kind, folder=tmp_path)
    assert all(rank.exit_code for rank in job.ranks)
    assert message in job.output
