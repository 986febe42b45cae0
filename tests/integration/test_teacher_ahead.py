"""Teachers that run ahead of updates, in windows: nothing changes but when a device works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_tspipe import DelayedTeacherUpdate
from lightning_tspipe.ir.action import Op
from tests.integration.jobs import run
from tests.integration.trainings import RESUMING, Session, Trained, Training
from tests.integration.windows import (
    INTERLEAVED,
    ONE_F_ONE_B,
    TO_AND_FRO,
    Averages,
    Classifier,
    Distils,
    Warms,
    loader,
    of,
    same,
)

SLOW = pytest.mark.slow
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
    (Late, of(2, (5,) * 7), 1, {ONE_F_ONE_B}),
    (Distils, of(1, (5,) * 6), 3, set()),
    (Distils, of(5, (5, 4, 5) * 6, gradient_clip_val=0.1), 4, set()),
    (Distils, of(12, (5,) * 30), 2, set()),
    (Changes, of(2, (5,) * 11), 2, {ONE_F_ONE_B, TO_AND_FRO}),
    (ChangesInSecret, of(2, (5,) * 11), 2, {INTERLEAVED}),
    (ChangesEveryEpoch, of(2, (5,) * 7), 2, {ONE_F_ONE_B}),
    (LeavesTraining, of(2, (5,) * 11), 2, {ONE_F_ONE_B}),
    (Warms, of(2, (5,) * 9), 2, {INTERLEAVED}),
    (Newest, of(3, (5,) * 7), 2, set()),
]


@pytest.mark.parametrize(
    ("kind", "training", "num_ranks"),
    [
        pytest.param(
            kind, replace(training, strategy=name), num_ranks, marks=[SLOW] * (name not in quick)
        )
        for kind, training, num_ranks, quick in CASES
        for name in (ONE_F_ONE_B, INTERLEAVED, TO_AND_FRO)
    ],
)
def test_it_is_that_of_one_device(
    kind: type[Classifier], training: Training, num_ranks: int, tmp_path: Path
) -> None:
    ranks = compared(training, kind, tmp_path, num_ranks)
    ahead = {step for found in ranks for step in ahead_of_updates(training, found)}
    assert bool(ahead) == (kind is not Newest)
    if kind in {Changes, ChangesInSecret, LeavesTraining}:
        assert ahead <= {4, 5}  # not before the third window, and not behind the change
