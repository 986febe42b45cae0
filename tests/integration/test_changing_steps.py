"""Steps that become others while the training goes on: as on one device, without a word."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_tspipe import DelayedTeacherUpdate, TSPipeStrategy
from tests.integration.comparing import alone
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Epochs, Session, Trained, Training

SIZES = ((4, 4, 4), (4, 3, 4), (4, 4, 4))
TRAINING = Training(options={"num_microbatches": 2, "costs": "flops"}, sizes=SIZES)
Step = Callable[["Warming", Tensor, Tensor, Tensor, int], Tensor]


IN_TWO = {"student": ["student", "head"]}
"""Between these two, the step computes something."""


class Two(nn.Module):
    """Returns what it computes, and something on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.last, self.temperature, self.number = nn.Linear(8, 6), 1.0, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.last(hidden) / self.temperature, hidden


class Warming(LightningModule):
    """A student and a frozen teacher, and a loss that changes."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher, self.head = Two(), Two(), nn.Linear(6, 2)
        self.teacher.requires_grad_(requires_grad=False)
        self.step, self.has_warmed, self.averages = step, False, False
        self.first_average = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.has_warmed = self.global_step > 3

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        if self.averages and self.global_step >= self.first_average:
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for old, new in pairs:
                old.lerp_(new, 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, z = batch
        return self.step(self, x, y, z, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def first_loss(module: Warming, x: Tensor) -> tuple[Tensor, Tensor]:
    made, hidden = module.student(x)
    return mse_loss(made, module.teacher(x)[0]), hidden


def another_call(module: Warming, x: Tensor, y: Tensor, _: Tensor, __: int) -> Tensor:
    loss, _hidden = first_loss(module, x)
    return loss + module.student(y)[0].square().mean() if module.current_epoch == 1 else loss


def numbered(module: Warming, x: Tensor, y: Tensor, z: Tensor, batch_idx: int) -> Tensor:
    """What no forward reads may be set of a network."""
    student: Any = module.student
    student.number = module.global_step
    return another_call(module, x, y, z, batch_idx)


def an_output(module: Warming, x: Tensor, _: Tensor, __: Tensor, ___: int) -> Tensor:
    loss, hidden = first_loss(module, x)
    return loss + hidden.square().mean() if module.current_epoch > 0 else loss


def a_field(module: Warming, x: Tensor, _: Tensor, z: Tensor, __: int) -> Tensor:
    made = module.student(x)[0]
    loss = mse_loss(made, module.teacher(x)[0])
    return loss + mse_loss(made, z) if module.current_epoch > 0 else loss


def a_penalty(module: Warming, x: Tensor, _: Tensor, __: Tensor, ___: int) -> Tensor:
    loss, _hidden = first_loss(module, x)
    if module.current_epoch > 0:
        loss = loss + 0.1 * sum(weight.norm() for weight in module.student.parameters())
    return loss


def a_head(module: Warming, x: Tensor, y: Tensor, z: Tensor, _: int) -> Tensor:
    loss, _hidden = first_loss(module, x)
    if module.current_epoch > 0:
        loss = loss + mse_loss(module.head(module.student(y)[0]), z[:, :2])
    return loss


def an_average(module: Warming, x: Tensor, _: Tensor, __: Tensor, ___: int) -> Tensor:
    if module.current_epoch > 1:
        pairs = zip(module.teacher.parameters(), module.student.parameters(), strict=True)
        for old, new in pairs:
            old.data.lerp_(new.data, 0.5)
    return first_loss(module, x)[0] + module.student(x)[0].square().mean()


def in_the_middle(module: Warming, x: Tensor, y: Tensor, _: Tensor, batch_idx: int) -> Tensor:
    loss, _hidden = first_loss(module, x)
    return loss + module.student(y)[0].square().mean() if batch_idx > 0 else loss


def behind_some_steps(module: Warming, x: Tensor, y: Tensor, _: Tensor, __: int) -> Tensor:
    loss, _hidden = first_loss(module, x)
    return loss + module.student(y)[0].square().mean() if module.global_step > 3 else loss


def now_and_then(module: Warming, x: Tensor, _: Tensor, z: Tensor, batch_idx: int) -> Tensor:
    made, hidden = module.student(x)
    loss = mse_loss(made, module.teacher(x)[0])
    if batch_idx % 2 == 1:
        loss = loss + hidden.square().mean() + mse_loss(made, z)
    return loss


def by_progress(module: Warming, x: Tensor, y: Tensor, _: Tensor, __: int) -> Tensor:
    """The other call comes first, so that the data rank meets it a step early."""
    loss = torch.zeros(())
    if module.global_step / (len(SIZES) * len(SIZES[0])) > 0.4:
        loss = loss + module.student(y)[0].square().mean()
    return loss + first_loss(module, x)[0]


def by_a_flag(module: Warming, x: Tensor, y: Tensor, _: Tensor, __: int) -> Tensor:
    """Of an attribute, nobody knows whether hooks set it on all ranks."""
    loss, _hidden = first_loss(module, x)
    return loss + module.student(y)[0].square().mean() if module.has_warmed else loss


def by_its_size(module: Warming, x: Tensor, y: Tensor, _: Tensor, __: int) -> Tensor:
    loss, _hidden = first_loss(module, x)
    return loss + module.student(y)[0].square().mean() if len(x) < 4 else loss


def an_average_in_the_middle(
    module: Warming, x: Tensor, y: Tensor, z: Tensor, batch_idx: int
) -> Tensor:
    if batch_idx > 0:
        pairs = zip(module.teacher.parameters(), module.student.parameters(), strict=True)
        for old, new in pairs:
            old.data.lerp_(new.data, 0.5)
    return first_loss(module, x)[0]


def beside_an_average(module: Warming, x: Tensor, y: Tensor, z: Tensor, batch_idx: int) -> Tensor:
    module.averages = True
    return in_the_middle(module, x, y, z, batch_idx)


def other_teacher_calls(module: Warming, x: Tensor, y: Tensor, z: Tensor, batch_idx: int) -> Tensor:
    module.averages = True
    loss, _hidden = first_loss(module, x)
    if module.global_step > 3:
        loss = loss + mse_loss(module.student(y)[0], module.teacher(z)[0])
    return loss


def inputs_by_progress(module: Warming, x: Tensor, y: Tensor, z: Tensor, batch_idx: int) -> Tensor:
    module.averages = True
    view = x * 1.1**module.global_step
    return mse_loss(module.student(view)[0], module.teacher(y + module.global_step)[0])


def to_and_fro(module: Warming, x: Tensor, y: Tensor, _: Tensor, batch_idx: int) -> Tensor:
    module.student.train(batch_idx % 2 == 0)
    return first_loss(module, x)[0]


def every_other_call(module: Warming, x: Tensor, y: Tensor, _: Tensor, batch_idx: int) -> Tensor:
    loss, _hidden = first_loss(module, x)
    return loss + module.student(y)[0].square().mean() if batch_idx % 2 else loss


def every_other_head(module: Warming, x: Tensor, y: Tensor, z: Tensor, batch_idx: int) -> Tensor:
    """The head is pipelined in some steps, and beside the loss in others."""
    loss, _hidden = first_loss(module, x)
    return loss + mse_loss(module.head(module.student(y)[0]), z[:, :2]) if batch_idx % 2 else loss


def averaged_by_turns(module: Warming, x: Tensor, y: Tensor, z: Tensor, batch_idx: int) -> Tensor:
    module.averages = True
    return every_other_call(module, x, y, z, batch_idx)


def by_a_factor(module: Warming, x: Tensor, _: Tensor, z: Tensor, __: int) -> Tensor:
    made = module.student(x)[0] * torch.tensor(1.0 + module.global_step) / 8
    return mse_loss(module.head(made), z[:, :2])


def by_an_attribute(module: Warming, x: Tensor, _: Tensor, z: Tensor, __: int) -> Tensor:
    made = module.student(x)[0] * (2.0 if module.has_warmed else 0.5)
    return mse_loss(module.head(made), z[:, :2])


def by_an_operation(module: Warming, x: Tensor, _: Tensor, z: Tensor, __: int) -> Tensor:
    made = module.student(x)[0]
    return mse_loss(module.head(made.tanh() if module.has_warmed else made), z[:, :2])


def in_another_mode(module: Warming, x: Tensor, _: Tensor, __: Tensor, ___: int) -> Tensor:
    if module.has_warmed:
        module.student.eval()
    made = module.student(x)[0]
    module.student.train()
    return mse_loss(made, module.teacher(x)[0])


def frozen_for_a_call(module: Warming, x: Tensor, y: Tensor, _: Tensor, __: int) -> Tensor:
    loss, _hidden = first_loss(module, x)
    module.student.requires_grad_(not module.has_warmed)
    loss = loss + module.student(y)[0].square().mean()
    module.student.requires_grad_(requires_grad=True)
    return loss


def at_another_temperature(module: Warming, x: Tensor, _: Tensor, __: Tensor, ___: int) -> Tensor:
    student: Any = module.student
    student.temperature = 1 / (1 + module.global_step)
    made = student(x)[0]
    student.temperature = 1.0
    return mse_loss(made, module.teacher(x)[0])


def a_part_frozen_for_a_call(module: Warming, x: Tensor, _: Tensor, __: Tensor, ___: int) -> Tensor:
    *_others, last = module.student.parameters()
    last.requires_grad_(module.global_step == 0)
    made = module.student(x)[0]
    last.requires_grad_()
    return mse_loss(made, module.teacher(x)[0])


def by_the_number_of_samples(module: Warming, x: Tensor, _: Tensor, z: Tensor, __: int) -> Tensor:
    made = module.student(x)[0].view(len(x), 2, 3).flatten(1)
    return mse_loss(module.head(made / (1 + module.current_epoch) / len(x)), z[:, :2])


class Unfreezing(Warming):
    """A head on a backbone, which is frozen at first, and then has a group of its own."""

    def on_train_epoch_start(self) -> None:
        self.student.requires_grad_(self.current_epoch > 0)
        if self.current_epoch == 1:
            group = {"params": [*self.student.parameters()], "lr": 0.05}
            self.optimizers().add_param_group(group)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


def on_a_backbone(module: Warming, x: Tensor, _: Tensor, z: Tensor, __: int) -> Tensor:
    made, hidden = module.student(x)
    distance = mse_loss(hidden, module.teacher(x)[1])
    return mse_loss(module.head(made), z[:, :2]) + distance


def train(training: Training, step: Step, delay: int = 1) -> Trained:
    kind = Unfreezing if step is on_a_backbone else Warming
    made = torch.Generator().manual_seed(1)
    epochs = [
        [tuple(torch.randn(n, 6, generator=made) for _ in range(3)) for n in sizes]
        for sizes in training.sizes
    ]
    strategy: Any = (
        training.strategy if training.strategy == "auto" else TSPipeStrategy(**training.options)
    )
    late = DelayedTeacherUpdate(delay)
    return Session(training, late, module=kind(step), strategy=strategy).fit(Epochs(epochs)).trained


@pytest.mark.parametrize(
    ("step", "options", "trainer"),
    [
        (another_call, {}, {}),
        (numbered, {}, {}),
        (an_output, {}, {}),
        (a_field, {}, {}),
        (a_head, {}, {}),
        (a_penalty, {}, {}),
        (an_average, {"schedule": "gpipe"}, {}),
        (another_call, {}, {"accumulate_grad_batches": 2}),
        (in_the_middle, {}, {}),
        (in_the_middle, {}, {"accumulate_grad_batches": 2}),
        (behind_some_steps, {}, {}),
        (now_and_then, {}, {}),
        (by_progress, {}, {}),
        (by_progress, {"schedule": "gpipe"}, {}),
        (an_average_in_the_middle, {"schedule": "gpipe"}, {}),
        (an_average_in_the_middle, {}, {}),
        (beside_an_average, {}, {}),
        (beside_an_average, {}, {"accumulate_grad_batches": 2}),
        (other_teacher_calls, {}, {}),
        (inputs_by_progress, {}, {}),
        (on_a_backbone, {}, {}),
        (by_a_factor, IN_TWO, {}),
        (by_the_number_of_samples, {**IN_TWO, "num_microbatches": 1}, {}),
    ],
)
def test_a_step_that_becomes_another(
    step: Step, options: dict[str, Any], trainer: dict[str, Any], tmp_path: Path
) -> None:
    training = replace(TRAINING, options={**TRAINING.options, **options}, trainer=trainer)
    job = partial(run, train)
    delay = int("schedule" not in options)
    expected = job(alone(training), step, delay, num_ranks=1, folder=tmp_path / "alone")[0]
    actual = job(training, step, delay, num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


def begins_to_average(module: Warming, x: Tensor, y: Tensor, z: Tensor, batch_idx: int) -> Tensor:
    """With the average, behind the step before: what the teacher was by then is not kept."""
    module.averages, module.first_average = True, 4
    return behind_some_steps(module, x, y, z, batch_idx)


def test_a_teacher_that_begins_to_change_with_another_step(tmp_path: Path) -> None:
    training = replace(TRAINING, sizes=((4,) * 6,))
    job = run_job(train, training, begins_to_average, folder=tmp_path)
    told = [error for error in job.errors if error.startswith("CaptureError")]
    assert told
    assert all("begins to change with this step" in error for error in told)


def test_another_number_between_two_networks_is_refused(tmp_path: Path) -> None:
    training = replace(TRAINING, options={**TRAINING.options, **IN_TWO})
    job = run_job(train, training, by_an_attribute, num_ranks=2, folder=tmp_path)
    (error,) = {error for error in job.errors if error.startswith("CaptureError")}
    assert "'head'" in error
    assert "mul(*, 2.0)" in error
    assert "did it by torch.Tensor.mul(*, 0.5)" in error
    assert "test_changing_steps.py" in error
    assert "torch.tensor(number)" in error


def test_another_operation_between_two_networks_is_refused(tmp_path: Path) -> None:
    training = replace(TRAINING, options={**TRAINING.options, **IN_TWO})
    job = run_job(train, training, by_an_operation, num_ranks=2, folder=tmp_path)
    (error,) = {error for error in job.errors if error.startswith("CaptureError")}
    assert "by torch.Tensor.tanh(*)[0]" in error
    assert "did it by %0.0 when it was traced" in error


def test_micro_batches_of_what_is_divided_by_the_number_of_samples(tmp_path: Path) -> None:
    training = replace(TRAINING, options={**TRAINING.options, **IN_TWO})
    job = run_job(train, training, by_the_number_of_samples, num_ranks=2, folder=tmp_path)
    assert all("num_microbatches=1" in error for error in job.errors), job.errors


@pytest.mark.parametrize("step", [by_its_size, by_a_flag])
def test_what_can_not_be_captured_again(step: Step, tmp_path: Path) -> None:
    job = run_job(train, TRAINING, step, num_ranks=2, folder=tmp_path)
    (error,) = {error for error in job.errors if error.startswith("CaptureError")}
    assert "test_changing_steps.py" in error
    assert "may change where an epoch begins" in error


@pytest.mark.parametrize(
    "step",
    [
        in_another_mode,
        at_another_temperature,
        pytest.param(a_part_frozen_for_a_call, marks=pytest.mark.slow),
        pytest.param(frozen_for_a_call, marks=pytest.mark.slow),
    ],
)
def test_what_is_set_for_a_call_of_a_later_step(step: Step, tmp_path: Path) -> None:
    job = run_job(train, TRAINING, step, num_ranks=2, folder=tmp_path)
    (error,) = {error for error in job.errors if error.startswith("CaptureError")}
    assert "has set the mode of 'student', what of it is trained, or another attribute" in error
    assert "test_changing_steps.py" in error


def told(training: Training, step: Step, delay: int) -> Trained:
    """With what is told of the run in the log."""
    logging.getLogger("lightning_tspipe").addHandler(logging.StreamHandler())
    return train(training, step, delay)


@pytest.mark.parametrize(
    ("step", "options", "trainer", "num_ranks"),
    [
        (every_other_call, {}, {"accumulate_grad_batches": 2}, 2),
        (averaged_by_turns, {}, {}, 2),
        (now_and_then, {}, {}, 2),
        (every_other_head, {"student": None}, {}, 2),
        pytest.param(every_other_call, {"schedule": "gpipe"}, {}, 2, marks=pytest.mark.slow),
        pytest.param(every_other_call, {"num_stages": 2}, {}, 4, marks=pytest.mark.slow),
    ],
)
def test_what_goes_to_and_fro_is_captured_once(
    step: Step, options: dict[str, Any], trainer: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    options = {**TRAINING.options, **options}
    delay = int("schedule" not in options)
    training = replace(
        TRAINING, options=options, trainer=trainer, num_ranks=num_ranks, sizes=((4,) * 5,) * 2
    )
    # Replicas are given the same batches.
    single = partial(run, train, alone(training), step, delay, num_ranks=1)
    expected = single(folder=tmp_path / "alone")[0]
    job = run_job(told, training, step, delay, num_ranks=num_ranks, folder=tmp_path / "together")
    actual = job.ranks[0].value
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
    assert job.ranks[0].output.count("it was captured again") == 1


class Average(Callback):
    """Before a checkpoint is saved: hooks of the module come later, and are lost with it."""

    @torch.no_grad()
    def on_train_batch_end(self, _: Any, pl_module: Any, *__: Any) -> None:
        pairs = zip(pl_module.teacher.parameters(), pl_module.student.parameters(), strict=True)
        for old, new in pairs:
            old.lerp_(new, 0.5)


class Save(Callback):
    """Keeps checkpoints of some batches."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        place = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if place in {2, 3}:
            trainer.save_checkpoint(f"{place}.ckpt")


def stopped(training: Training, step: Step, *averages: Callback) -> list[Trained]:
    """A whole run, and what became of it from its checkpoints."""
    made = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(4, 6, generator=made) for _ in range(3)) for _ in range(6)]

    def fit(*callbacks: Callback, **arguments: Any) -> Trained:
        strategy = TSPipeStrategy(**training.options)
        callbacks = (*averages, *callbacks)
        session = Session(training, *callbacks, module=Warming(step), strategy=strategy)
        return session.fit(Epochs([batches]), **arguments).trained

    return [fit(Save()), *(fit(ckpt_path=f"{place}.ckpt") for place in (2, 3))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [(every_other_call,), (every_other_head,), (every_other_call, Average())],
    ids=["a call", "a head", "averaged"],
)
def test_a_run_that_goes_to_and_fro_goes_on(made: tuple[Any, ...], tmp_path: Path) -> None:
    whole, *others = run(stopped, TRAINING, *made, num_ranks=2, folder=tmp_path)[0]
    for each in others:
        losses = whole.losses[len(whole.losses) - len(each.losses) :]
        torch.testing.assert_close(each.losses, losses, **CLOSE)
        torch.testing.assert_close(each.weights, whole.weights, **CLOSE)
    assert [len(each.losses) for each in others] == [16, 15]


def test_steps_that_go_to_and_fro_are_told(tmp_path: Path) -> None:
    job = run_job(train, replace(TRAINING, sizes=((4,) * 6,)), to_and_fro, folder=tmp_path)
    told = "the step goes to and fro: in epoch 0 it was captured again 4 times"
    assert any(told in error for error in job.errors), job.errors  # in tests, warnings are errors


@pytest.mark.slow
def test_replicas_capture_again_together(tmp_path: Path) -> None:
    options = {**TRAINING.options, "num_stages": 2}
    training = replace(TRAINING, options=options, num_ranks=4)
    found = run(train, training, another_call, num_ranks=4, folder=tmp_path)
    pair = replace(TRAINING, sizes=TRAINING.sizes)
    expected = run(train, pair, another_call, num_ranks=2, folder=tmp_path / "pair")[0]
    # Both replicas are given the same batches.
    torch.testing.assert_close(found[0].weights, expected.weights, **CLOSE)


def by_its_size_and_progress(module: Warming, x: Tensor, _: Tensor, z: Tensor, __: int) -> Tensor:
    """Whoever has whole batches only never asks about the ``global_step``."""
    made, hidden = module.student(x)
    loss = mse_loss(made, module.teacher(x)[0]) + hidden.square().mean()
    return loss + mse_loss(made, z) if len(x) < 4 and module.global_step > 3 else loss


def of_both_replicas(module: Warming, x: Tensor, y: Tensor, z: Tensor, batch_idx: int) -> Tensor:
    parts = zip(x.split([4, 3]), y.split([4, 3]), z.split([4, 3]), strict=True)
    losses = [by_its_size_and_progress(module, *part, batch_idx) for part in parts]
    return torch.stack(losses).mean()


def train_share(training: Training, step: Step) -> Trained:
    made = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(7, 6, generator=made) for _ in range(3)) for _ in range(6)]
    if training.num_ranks > 1:
        part = (
            int(os.environ["LOCAL_RANK"]) // 2
        )  # whole for the first replica, three for the other
        batches = [tuple(each.split([4, 3])[part] for each in batch) for batch in batches]
    strategy: Any = TSPipeStrategy(**training.options) if training.num_ranks > 1 else "auto"
    session = Session(training, DelayedTeacherUpdate(1), module=Warming(step), strategy=strategy)
    return session.fit(Epochs([batches])).trained


def test_replicas_ask_each_other_what_they_ask(tmp_path: Path) -> None:
    options = {**TRAINING.options, "num_stages": 2}
    training = replace(TRAINING, options=options, num_ranks=4)
    asking = by_its_size_and_progress
    found = run(train_share, training, asking, num_ranks=4, folder=tmp_path / "together")
    single = alone(training)
    expected = run(train_share, single, of_both_replicas, num_ranks=1, folder=tmp_path)[0]
    for rank in found[::2]:
        torch.testing.assert_close(rank.weights, expected.weights, **CLOSE)
