"""What a step does to the teacher after its last call, such as the EMA of lightly's DINO."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import StepPlan
from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.replay.runner import StepRunner

NETWORKS = Networks(("student",), ("teacher",))


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)
        self.teacher.requires_grad_(requires_grad=False)
        self.head = nn.Linear(2, 2)
        self.register_buffer("center", torch.zeros(2))
        self.automatic_optimization = True
        self.count = 0

    def training_step(self, batch: Tensor) -> Tensor:
        p, z = self.student(batch), self.teacher(batch)
        loss = (self.head(p) - z - self.center).square().sum()
        self.center.mul_(0.5).add_(z.mean(0))
        self.count += 1
        self.student.weight.grad = None
        self.update()
        return loss

    @torch.no_grad()
    def update(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)


def trace(module: nn.Module, step: Callable[[Any], Any]) -> StepPlan:
    return Tracer(module, NETWORKS, torch.device("cpu")).trace(step, torch.randn(4, 3), seed=0)


def gradients(module: Module) -> Iterator[Tensor]:
    return (p.grad for p in module.parameters() if p.grad is not None)


def test_they_happen_once_and_nothing_else_does() -> None:
    module = Module()
    plan = trace(module, module.training_step)
    assert (plan.has_effects, plan.has_late_effects, plan.has_ema) == (False, True, True)
    before, expected = copy.deepcopy(module), copy.deepcopy(module)
    expected.update()
    runner = StepRunner(module, NETWORKS, plan, is_loss_rank=True)
    module.student.weight.grad = torch.ones(2, 3)
    runner.late_effects(module.training_step, torch.randn(4, 3), 0, rehearsal=True)
    torch.testing.assert_close(module.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert len(list(gradients(module))) == 1
    runner.late_effects(module.training_step, torch.randn(2, 3), 0)  # a smaller batch
    torch.testing.assert_close(module.teacher.state_dict(), expected.teacher.state_dict())
    assert not torch.equal(module.teacher.weight, before.teacher.weight)
    assert not list(gradients(module))
    assert torch.equal(module.center, before.center)
    assert torch.equal(module.head.weight, before.head.weight)
    assert module.count == 0


def test_a_step_that_needs_values_is_refused_before_the_training() -> None:
    module = Module()

    def step(batch: Tensor) -> Tensor:
        loss = module.training_step(batch)
        if loss.item() > 1e9:
            module.update()
        return loss

    plan = trace(module, step)
    runner = StepRunner(module, NETWORKS, plan, is_loss_rank=True)
    with pytest.raises(CaptureError, match=r"(?s)runs without values.*test_late_effects.*on_train"):
        runner.late_effects(step, torch.randn(4, 3), 0, rehearsal=True)


@torch.no_grad()
def shrink(network: nn.Module) -> None:
    for parameter in network.parameters():
        parameter.mul_(0.9)


def students(module: Module, batch: Tensor) -> Tensor:
    loss = module.student(batch).sum() - module.teacher(batch).sum()
    shrink(module.student)
    return loss


def early_too(module: Module, batch: Tensor) -> Tensor:
    shrink(module.teacher)
    return module.training_step(batch)


def by_hand(module: Module, batch: Tensor) -> Tensor:
    return module.training_step(batch)


@pytest.mark.parametrize(
    ("step", "reason"),
    [(students, "backward is still to come"), (early_too, "others before it"),
     (by_hand, "optimized by hand")],
)  # fmt: skip
def test_what_comes_too_late(step: Callable[[Module, Any], Any], reason: str) -> None:
    module = Module()
    module.automatic_optimization = step is not by_hand
    message = rf"(?s)after its last call.*test_late_effects.py.*{reason}.*MomentumEMA"
    with pytest.raises(CaptureError, match=message):
        trace(module, lambda batch: step(module, batch))
