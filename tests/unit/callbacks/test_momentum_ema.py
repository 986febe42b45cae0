from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_tspipe.callbacks import MomentumEMA
from lightning_tspipe.callbacks.momentum_ema import BuffersPolicy, Momentum, cosine_momentum
from lightning_tspipe.errors import ConfigurationError


class Trainable(Protocol):
    student: nn.Module
    teacher: nn.Module

    def training_step(self, batch: Tensor) -> Tensor: ...

    def configure_optimizers(self) -> torch.optim.Optimizer: ...


def train_by_hand(
    module: Trainable,
    batches: list[Tensor],
    momentums: list[float],
    *,
    accumulate: int,
    policy: str,
) -> None:
    """The same training in plain lines; ``momentums`` holds one number per optimizer step."""
    optimizer = module.configure_optimizers()
    updates = iter(momentums)
    for index, batch in enumerate(batches):
        if index % accumulate == 0:
            optimizer.zero_grad()
        (module.training_step(batch) / accumulate).backward()
        if index % accumulate != accumulate - 1:
            continue
        optimizer.step()
        m = next(updates)
        students = dict(module.student.named_parameters())
        with torch.no_grad():
            for name, parameter in module.teacher.named_parameters():
                parameter.copy_(m * parameter + (1 - m) * students[name])
            buffers = dict(module.student.named_buffers())
            for name, buffer in module.teacher.named_buffers():
                if policy == "copy" or (policy == "average" and not buffer.is_floating_point()):
                    buffer.copy_(buffers[name])
                elif policy == "average":
                    buffer.copy_(m * buffer + (1 - m) * buffers[name])


@pytest.mark.parametrize("policy", ["keep", "copy", "average"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["constant", "cosine", "function"])
def test_equals_a_plain_loop(
    kind: str, accumulate: int, policy: BuffersPolicy, lab: SimpleNamespace
) -> None:
    loader = lab.loader(4)
    num_steps = 2 * 4 // accumulate
    momentums: dict[str, Momentum] = {
        "constant": 0.9,
        "cosine": (0.5, 1.0),
        "function": lambda step, total: 0.25 + 0.5 * step / total,
    }
    expected = {
        "constant": [0.9] * num_steps,
        "cosine": [cosine_momentum(step, num_steps, 0.5, 1.0) for step in range(num_steps)],
        "function": [0.25 + 0.5 * step / num_steps for step in range(num_steps)],
    }[kind]
    reference = lab.module(batch_norm=True)
    train_by_hand(reference, loader.batches * 2, expected, accumulate=accumulate, policy=policy)
    module = lab.module(batch_norm=True)
    trainer = lab.trainer(
        callbacks=[MomentumEMA(momentums[kind], buffers=policy)], accumulate_grad_batches=accumulate
    )
    trainer.fit(module, loader)
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)
    assert module.losses == pytest.approx(reference.losses, rel=1e-12)


def test_cosine_is_lightlys() -> None:
    scheduler = pytest.importorskip("lightly.utils.scheduler")
    for num_steps in (1, 2, 7):
        for step in range(num_steps):
            theirs = scheduler.cosine_schedule(step, num_steps, 0.9, 1.0)
            assert cosine_momentum(step, num_steps, 0.9, 1.0) == pytest.approx(theirs, abs=1e-15)


def test_several_named_submodules(lab: SimpleNamespace) -> None:
    class Named(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.ModuleDict({"body": nn.Linear(4, 3), "head": nn.Linear(3, 2)}).double()
            self.slow = deepcopy(self.net)

        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.net["head"](self.net["body"](batch)).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Named()
    before = deepcopy(module.slow)
    ema = MomentumEMA(0.75, student=["net.body", "net.head"], teacher=["slow.body", "slow.head"])
    lab.trainer(callbacks=[ema], max_epochs=1).fit(module, lab.loader(1))
    for name, parameter in module.slow.named_parameters():
        student = module.net.get_parameter(name)
        expected = 0.75 * before.get_parameter(name) + 0.25 * student
        torch.testing.assert_close(parameter.data, expected.data)
        assert not parameter.requires_grad
        assert student.requires_grad


def test_two_teachers_of_one_student(lab: SimpleNamespace) -> None:
    class Two(lab.module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.other = deepcopy(self.teacher)

    module = Two()
    ema = MomentumEMA(0.5, student=["student", "student"], teacher=["teacher", "other"])
    lab.trainer(callbacks=[ema], max_epochs=1).fit(module, lab.loader(2))
    torch.testing.assert_close(module.other.state_dict(), module.teacher.state_dict())


def test_a_step_that_the_scaler_skips_changes_nothing(lab: SimpleNamespace) -> None:
    class Overflowing(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(4, 2)
            self.teacher = deepcopy(self.student)
            self.teachers: list[Tensor] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            factor = float("inf") if batch_idx == 1 else 1.0
            loss: Tensor = self.student(batch.float()).float().mean() * factor
            return loss

        def on_train_batch_end(self, *_: object) -> None:
            self.teachers.append(self.teacher.weight.clone())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.student.parameters(), lr=0.1)

    module = Overflowing()
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))
    trainer = lab.trainer(callbacks=[MomentumEMA(0.5)], max_epochs=1, plugins=[precision])
    trainer.fit(module, lab.loader(3))
    first, second, third = module.teachers
    assert trainer.global_step == 3  # Lightning counts the skipped step
    assert torch.equal(first, second)
    assert not torch.equal(second, third)


def test_a_rank_averages_what_it_owns(lab: SimpleNamespace) -> None:
    module = lab.module()
    ema = MomentumEMA(0.5)
    lab.trainer(callbacks=[ema], max_epochs=1).fit(module, lab.loader(1))
    # What a pipeline does to another rank's parameters: same objects, now without memory.
    for network in (module.student, module.teacher):
        foreign = nn.Parameter(network[0].weight.to("meta"), network[0].weight.requires_grad)
        torch.utils.swap_tensors(network[0].weight, foreign)
    before = module.teacher[2].weight.clone()
    ema.update(0.5)
    assert module.teacher[0].weight.is_meta
    torch.testing.assert_close(module.teacher[2].weight, (before + module.student[2].weight) / 2)

    foreign = nn.Parameter(module.student[2].weight.to("meta"))
    torch.utils.swap_tensors(module.student[2].weight, foreign)
    with pytest.raises(ConfigurationError, match=r"teacher\.2\.weight .* different ranks"):
        ema.update(0.5)


def test_momentum_is_logged(lab: SimpleNamespace) -> None:
    trainer = lab.trainer(callbacks=[MomentumEMA(0.7, log_momentum=True)], max_epochs=1)
    trainer.fit(lab.module(), lab.loader(2))
    assert trainer.callback_metrics["ema_momentum"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.5}, r"momentum=1\.5"),
        ({"momentum": (0.9, 1.1)}, "momentum="),
        ({"student": ["a", "b"]}, "name as many teacher as student submodules"),
        ({"buffers": "drop"}, "'keep', 'copy' or 'average'"),
        ({"teacher": []}, "dotted name"),
    ],
)
def test_contradicting_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MomentumEMA(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": "mentor"}, r"no submodule 'mentor'.*direct submodules: student, teacher"),
        ({"student": "teacher.0", "teacher": "teacher"}, r"teacher\.0\.weight has no"),
        (
            {"student": "student.2", "teacher": "teacher.0"},
            r"teacher\.0\.weight has shape \(5, 4\)",
        ),
        ({"student": "teacher", "teacher": "teacher"}, "share"),
    ],
)
def test_teachers_that_do_not_fit(
    options: dict[str, Any], message: str, lab: SimpleNamespace
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        lab.trainer(callbacks=[MomentumEMA(**options)]).fit(lab.module(), lab.loader(1))


def test_a_cosine_needs_an_end(lab: SimpleNamespace) -> None:
    trainer = lab.trainer(callbacks=[MomentumEMA((0.9, 1.0))], max_epochs=-1)
    with pytest.raises(ConfigurationError, match="needs the number of steps"):
        trainer.fit(lab.module(), lab.loader(1))


def test_a_schedule_that_leaves_the_range(lab: SimpleNamespace) -> None:
    trainer = lab.trainer(callbacks=[MomentumEMA(lambda step, _: 1.0 + step)])
    with pytest.raises(ConfigurationError, match=r"momentum=2\.0"):
        trainer.fit(lab.module(), lab.loader(2))
