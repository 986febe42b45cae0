"""Steps that augment, change their batch, or depend on what changes: right, or refused.

Random numbers are those that the same step draws on one device under the seed of its batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_tspipe.capture.held import generators_of
from tests.integration.comparing import alone
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE, Epochs, Session, Trained, Training, delayed

TRAINING = Training(strategy="instance", options={"num_microbatches": 2}, sizes=((4, 4, 4, 3),))
Step = Callable[["Pair", Any, int], Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


class Pair(LightningModule):
    """A student and a frozen teacher of one structure, and things that steps use."""

    student_names = ("student",)
    teacher_names = ("teacher",)

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = network(), network()
        self.teacher.requires_grad_(requires_grad=False)
        self.step = step
        self.generator = np.random.default_rng(3)
        self.scale = 1.0
        self.count = 0
        torch.manual_seed(0)

    def distance(self, x: Tensor) -> Tensor:
        return mse_loss(self.student(x), self.teacher(x))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 1.0 + (batch_idx >= 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if (
            self.trainer.world_size == 1
            and type(self.trainer.strategy).__name__ != "TSPipeStrategy"
        ):
            networks = {*self.student.modules(), *self.teacher.modules()}
            with generators_of(m for m in self.modules() if m not in networks).stream(batch_idx):
                return self.step(self, batch, batch_idx)
        return self.step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.1, momentum=0.9)


def batches() -> list[Any]:
    made = torch.Generator().manual_seed(1)
    return [
        {
            "names": ["a"] * n,
            "x": torch.randn(n, 6, generator=made),
            "y": torch.randn(n, 6, generator=made),
            "boxes": [torch.randn(1 + (n + k) % 3, 6, generator=made) for k in range(n)],
        }
        for n in TRAINING.sizes[0]
    ]


def train(training: Training, step: Step, kind: type[Pair] = Pair) -> Trained:
    validation = Epochs([batches()]) if "validation_step" in vars(kind) else None
    loader = Epochs([batches()])
    return Session(training, module=kind(step)).fit(loader, validation).trained


def draws_everywhere(module: Pair, batch: Any, _: int) -> Tensor:
    share, factor = np.random.beta(1.0, 1.0), random.random()  # noqa: NPY002, S311
    own, noise = float(module.generator.random()), torch.randn(6, device=module.device)
    x = share * batch["x"] * factor + (1 - share) * batch["x"].flip(0) * own + noise
    target = share * batch["y"] + own * factor
    return module.distance(x) + mse_loss(module.student(x), target) * torch.rand(1, device=x.device)


def puts_into_the_batch(module: Pair, batch: Any, _: int) -> Tensor:
    batch["x"] = batch["x"] * 2
    y = batch.pop("y")
    return module.distance(batch["x"]) + mse_loss(module.student(batch["x"]), y)


def writes_into_the_batch(module: Pair, batch: Any, _: int) -> Tensor:
    batch["x"].mul_(2)
    batch["x"][0] = 1
    distance = module.distance(batch["x"])
    batch["y"].mul_(3)
    return distance + mse_loss(module.student(batch["y"]), batch["x"])


def selects_by_a_mask(module: Pair, batch: Any, _: int) -> Tensor:
    return module.distance(batch["x"][batch["x"][:, 0] > -1.5])


def divides_outputs(module: Pair, batch: Any, _: int) -> Tensor:
    p, z = module.student(batch["x"]), module.teacher(batch["x"])
    p /= 2
    z.div_(3)
    return mse_loss(p, z)


def has_ragged_targets(module: Pair, batch: Any, _: int) -> Tensor:
    p, boxes = module.student(batch["x"]), batch["boxes"]
    losses = [mse_loss(q.expand_as(t), t) for q, t in zip(p, boxes, strict=True)]
    return module.distance(batch["x"]) * len(batch["names"]) + torch.stack(losses).sum()


def calls_without_gradients_first(module: Pair, batch: Any, _: int) -> Tensor:
    with torch.no_grad():
        target = module.student(batch["y"])
    return mse_loss(module.student(batch["x"]), target) + 0 * module.teacher(batch["x"]).sum()


def sets_the_mode(module: Pair, batch: Any, _: int) -> Tensor:
    module.teacher.eval()
    module.teacher[-1].weight.requires_grad = False
    return module.distance(batch["x"])


def keeps_a_broadcast_tensor(module: Pair, batch: Any, _: int) -> Tensor:
    """The data rank has no outputs: there it is of ones."""
    loss = mse_loss(kept := module.student(batch["x"]), module.teacher(batch["x"]))
    module.kept = kept.detach()
    return loss + mse_loss(module.student(batch["y"]), batch["x"])


def writes_into_later_batches(module: Pair, batch: Any, batch_idx: int) -> Tensor:
    if batch_idx > 0:
        batch["x"][0] = batch["x"][1] * 2
    return module.distance(batch["x"])


def freezes_later(module: Pair, batch: Any, batch_idx: int) -> Tensor:
    module.student[0].requires_grad_(batch_idx < 2)
    return module.distance(batch["x"])


def sets_the_mode_later(module: Pair, batch: Any, batch_idx: int) -> Tensor:
    module.student.train(batch_idx < 3)
    return module.distance(batch["x"])


def reads_the_global_step(module: Pair, batch: Any, _: int) -> Tensor:
    return module.distance(batch["x"] * (1 + module.global_step))


def sets_the_mode_between_calls(module: Pair, batch: Any, _: int) -> Tensor:
    module.student.eval()
    with torch.no_grad():
        target = module.student(batch["y"])
    module.student.train()
    return mse_loss(module.student(batch["x"]), target)


RIGHT = (
    writes_into_later_batches, freezes_later, sets_the_mode_later, reads_the_global_step,
    sets_the_mode, sets_the_mode_between_calls, keeps_a_broadcast_tensor,
    calls_without_gradients_first,
    draws_everywhere, puts_into_the_batch, writes_into_the_batch, selects_by_a_mask,
    divides_outputs, has_ragged_targets,
)  # fmt: skip


@pytest.mark.parametrize("step", RIGHT)
def test_steps_that_are_right(step: Step, tmp_path: Path) -> None:
    expected = run(train, alone(TRAINING), step, num_ranks=1, folder=tmp_path / "alone")[0]
    actual = run(train, TRAINING, step, num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


def reads_an_attribute_of_a_hook(module: Pair, batch: Any, _: int) -> Tensor:
    return module.distance(batch["x"] * module.scale)


def counts_behind_the_calls(module: Pair, batch: Any, _: int) -> Tensor:
    loss = module.distance(batch["x"] * (1 + module.count))
    module.count = module.count + 1
    return loss


def draws_without_a_seed(module: Pair, batch: Any, _: int) -> Tensor:
    return module.distance(batch["x"] * np.random.default_rng().random())


def reads_the_teacher_without_a_seed(module: Pair, batch: Any, _: int) -> Tensor:
    late = module.teacher(batch["x"])
    return (
        module.distance(batch["x"]) + module.student(late * np.random.default_rng().random()).sum()
    )


def selects_by_the_teacher(module: Pair, batch: Any, _: int) -> Tensor:
    late = module.teacher(batch["x"])
    return module.student(batch["x"][late[:, 0] > late[:, 0].mean()]).square().sum()


def selects_the_sure_ones(module: Pair, batch: Any, _: int) -> Tensor:
    late = module.teacher(batch["x"]).softmax(1).amax(1)
    return module.student(batch["x"][late > 0.2]).square().sum()


REFUSED = {
    selects_by_the_teacher: "Shapes must not depend on values",
    selects_the_sure_ones: "Shapes must not depend on values",
    reads_the_teacher_without_a_seed: "differs each time",
    reads_an_attribute_of_a_hook: "depends on something that a step or a hook changes",
    counts_behind_the_calls: "depends on something that a step or a hook changes",
    draws_without_a_seed: "differs each time",
}


@pytest.mark.parametrize(("step", "cause"), REFUSED.items())
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_that_are_refused(step: Step, cause: str, num_ranks: int, tmp_path: Path) -> None:
    """One rank says in which line, and why."""
    training = replace(TRAINING, num_ranks=num_ranks)
    job = run_job(train, training, step, num_ranks=num_ranks, folder=tmp_path)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    errors = [error for error in job.errors if error.startswith("CaptureError")]
    assert len(set(errors)) == 1, job.errors
    assert "test_pure_steps.py" in errors[0]
    assert cause in errors[0]


def test_hooks_are_in_time_without_a_lookahead(tmp_path: Path) -> None:
    """As the message says."""
    step = reads_an_attribute_of_a_hook
    expected = run(train, alone(TRAINING), step, num_ranks=1, folder=tmp_path / "alone")[0]
    training = replace(TRAINING, options={"num_microbatches": 2, "schedule": "gpipe"})
    actual = run(train, training, step, num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


class FreesLayers(Pair):
    """Trains its first layers from the third batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.student[:3].requires_grad_(batch_idx >= 2)


class ValidatesByItself(Pair):
    """Calls no network there, and keeps what it computes in a list of its class."""

    found: ClassVar[list[Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found.append(batch["x"].sum() + batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("found", torch.stack(self.found).sum())
        self.found.clear()


class AveragesEarly(Pair):
    """Updates its teacher between the forward and the backward."""

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 0.1)


class AveragesAsTorchDoes(Pair):
    """Its teacher has a counter that no layer reads, and each rank needs."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        average = AveragedModel(self.student, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.teacher: Any = average.requires_grad_(requires_grad=False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.teacher.update_parameters(self.student)


class Repeats(nn.Module):
    """Gives each sample several times, of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 1

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None] * torch.arange(1, self.count + 1, device=x.device)[:, None]


class Means(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class RepeatsMore(Pair):
    """Its stages send each other larger tensors from the third batch on."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.repeats = Repeats()
        self.student = nn.Sequential(self.repeats, *self.student, Means())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.repeats.count = 1 + (batch_idx >= 2)


class Scaled(nn.Sequential):
    """Has a scale, and a batch normalisation that depends on the mode."""

    def __init__(self) -> None:
        super().__init__(*network(), nn.BatchNorm1d(6))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale  # type: ignore[no-untyped-call]


class WithMode(Pair):
    """What its teacher gives depends on the mode."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.teacher: Any = Scaled().requires_grad_(requires_grad=False)


class ScalesItsTeacher(WithMode):
    """The teacher runs a step early."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.teacher.scale = 1.0 + batch_idx


class SetsALayerOfItsTeacher(WithMode):
    """What a layer of torch's reads of itself, nothing guards."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.teacher[-1].train(batch_idx % 2 == 0)


class WithStatistics(Pair):
    """Normalises what it gives to its networks."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.norm = nn.BatchNorm1d(6, affine=False)


def normalises_before(module: Any, batch: Any, _: int) -> Tensor:
    return module.distance(module.norm(batch["x"]))  # type: ignore[no-any-return]


class InBfloat16(Pair):
    """Computes so in its networks only."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.float()


def in_bfloat16(module: Pair, batch: Any, _: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = module.student(batch["x"].float())
    return mse_loss(made.float(), module.teacher(batch["y"].float()))


@pytest.mark.parametrize(
    ("kind", "step"),
    [(WithMode, sets_the_mode), (InBfloat16, in_bfloat16), (WithStatistics, normalises_before)],
)
def test_what_a_step_sets_around_its_calls(kind: type[Pair], step: Step, tmp_path: Path) -> None:
    training = replace(TRAINING, options={"num_microbatches": 1})
    expected = run(train, alone(training), step, kind, num_ranks=1, folder=tmp_path / "alone")[0]
    actual = run(train, training, step, kind, num_ranks=2, folder=tmp_path / "together")[0]
    torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


@pytest.mark.parametrize("kind", [ScalesItsTeacher, SetsALayerOfItsTeacher])
def test_a_teacher_that_a_hook_changes_after_it_ran_is_refused(
    kind: type[Pair], tmp_path: Path
) -> None:
    job = run_job(train, TRAINING, plain, kind, num_ranks=2, folder=tmp_path)
    assert any("after the network has run ahead" in error for error in job.errors), job.output


def plain(module: Pair, batch: Any, _: int) -> Tensor:
    return module.distance(batch["x"]) + mse_loss(module.student(batch["x"]), batch["y"])


class DecidesByTheLoss(Pair):
    """Each rank has the loss in its hook, and goes by it."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        for parameter in self.student.parameters():
            parameter.mul_(1 - 0.01 * outputs["loss"].item())


class SetsWhatIsReadElsewhere(Pair):
    """Its step sets what its hooks read on each rank, and its next step before the calls."""

    rate, size = 0.0, torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.lerp_(new, self.rate)
        loss = super().training_step(batch, batch_idx)
        self.rate, self.size = 0.2 + 0.1 * batch_idx, loss.detach()
        return loss

    def on_after_backward(self) -> None:
        for parameter in self.student.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + self.size.item())


AVERAGING = (AveragesEarly, AveragesAsTorchDoes, SetsWhatIsReadElsewhere)


@pytest.mark.parametrize(
    "kind", [FreesLayers, ValidatesByItself, RepeatsMore, DecidesByTheLoss, *AVERAGING]
)
def test_hooks_that_are_right(kind: type[Pair], tmp_path: Path) -> None:
    single = replace(alone(TRAINING), callbacks=delayed if kind in AVERAGING else list)
    expected = run(train, single, plain, kind, num_ranks=1, folder=tmp_path / "alone")[0]
    for num_ranks in (1, 2) if kind is ValidatesByItself else (2,):
        training = replace(TRAINING, num_ranks=num_ranks)
        folder = tmp_path / str(num_ranks)
        actual = run(train, training, plain, kind, num_ranks=num_ranks, folder=folder)[0]
        torch.testing.assert_close(actual.losses, expected.losses, **CLOSE)
        torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)
        assert actual.metrics == pytest.approx(expected.metrics, rel=1e-9)
