"""Stand-ins of parameters that refuse to be written into, and steps that do it later only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.replay.runner import StepRunner
from lightning_tspipe.replay.watching import unwritten

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda p: p.mul_(0.5),
    "its data": lambda p: p.data.mul_(0.5).add_(1),
    "other data": lambda p: setattr(p, "data", p.data * 0.5),
    "a view": lambda p: p.detach().view(-1)[1:].zero_(),
    "an entry": lambda p: p.__setitem__(0, 1.0),
    "a copy": lambda p: p.copy_(torch.ones(2, 3)),
    "an output": lambda p: torch.mul(p.detach(), 2, out=p),
    "each": lambda p: torch._foreach_mul_([p], 2.0),
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "another tensor": lambda p: (p * 2).mul_(2),
    "gradients": lambda p: setattr(p, "grad", None),
    "whether it is trained": lambda p: p.requires_grad_(False),
    "shapes": lambda p: (p.shape, p.dtype, p.device, p.is_meta, p.data_ptr()),
    "into another one": lambda p: torch.ones(2, 3, device="meta").copy_(p),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("center", torch.ones(2, 3))


@pytest.mark.parametrize("kind", ["weight", "center"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused(name: str, kind: str) -> None:
    layer = Layer()
    message = r"changes a parameter .*test_watching.*did not when it was traced.*on_train_batch"
    with torch.no_grad(), pytest.raises(CaptureError, match=message), unwritten([layer])():
        WRITES[name](getattr(layer, kind))
    assert layer.weight.tolist() == layer.center.tolist() == torch.ones(2, 3).tolist()


@pytest.mark.filterwarnings("ignore:for weight")
def test_what_load_state_dict_writes() -> None:
    layer = Layer()
    with pytest.raises(CaptureError, match="did not when it was traced"), unwritten([layer])():
        layer.load_state_dict(Layer().state_dict())


@pytest.mark.parametrize("kind", ["weight", "center"])
@pytest.mark.parametrize("name", READS)
def test_all_else_works(name: str, kind: str) -> None:
    layer = Layer()
    with unwritten([layer])():
        READS[name](getattr(layer, kind))


def test_a_copy_is_free() -> None:
    layer = Layer()
    with unwritten([layer])(), torch.no_grad():
        made = copy.deepcopy(layer)
        made.weight.mul_(2)
        made.center.mul_(2)
    assert [*made.state_dict()] == [*layer.state_dict()]


class Later(nn.Module):
    """Its teacher is its student once more, but not with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)
        self.teacher.requires_grad_(requires_grad=False)
        self.automatic_optimization = True

    def training_step(self, batch: Tensor, *, early: bool = False, late: bool = False) -> Tensor:
        if early:
            self.teacher.load_state_dict(self.student.state_dict())
        loss = (self.student(batch) - self.teacher(batch)).square().sum()
        if late:
            self.teacher.load_state_dict(self.student.state_dict())
        return loss


def runner_of(module: Later, step: Callable[[Tensor], Tensor]) -> StepRunner:
    networks = Networks(("student",), ("teacher",))
    plan = Tracer(module, networks, torch.device("cpu")).trace(step, torch.randn(4, 3), seed=0)
    return StepRunner(module, networks, plan, is_loss_rank=True)


def test_what_a_step_does_later() -> None:
    module, batch = Later(), torch.randn(4, 3)
    runner = runner_of(module, module.training_step)
    late, early = (partial(module.training_step, **{name: True}) for name in ("late", "early"))
    message = r"test_watching.py:\d+ \(self.teacher.load_state_dict"
    with pytest.raises(CaptureError, match=message):
        runner.inputs(early, batch, 0, effects=True)
    runner.inputs(late, batch, 0, effects=True)
    outputs = {0: torch.randn(4, 2, requires_grad=True), 1: torch.randn(4, 2)}
    for step in (late, early):
        with pytest.raises(CaptureError, match=message):
            runner.replay(step, batch, 0, lambda call, _: outputs[call])


@pytest.mark.parametrize("traced", ["early", "late"])
def test_at_another_time_than_when_it_was_traced(traced: str) -> None:
    module, batch = Later(), torch.randn(4, 3)
    runner = runner_of(module, partial(module.training_step, **{traced: True}))
    outputs = {0: torch.randn(4, 2, requires_grad=True), 1: torch.randn(4, 2)}

    def replay(**options: bool) -> None:
        step = partial(module.training_step, **options)
        runner.replay(step, batch, 0, lambda call, _: outputs[call])

    replay(**{traced: True})
    replay()
    with pytest.raises(CaptureError, match="did not when it was traced"):
        replay(early=True, late=True)
