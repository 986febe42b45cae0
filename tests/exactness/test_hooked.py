"""Losses that read what forward hooks keep train what the sequential reference trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_tspipe.capture.trace import Networks, Tracer
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.replay.runner import StepRunner
from tests.choosing import some_of
from tests.exactness.compare import assert_learned, assert_same
from tests.exactness.hooked import HOOKED, REFUSED, Hooked, case
from tests.exactness.modules import Trained
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting

SCHEDULES = some_of(["tspipe", "gpipe"], slow=["gpipe"], always=["tspipe"])


@dataclass(frozen=True)
class HookedSetting(Setting):
    """A training of a module of ``hooked``."""

    def build(self) -> Trained:
        return case(self.case)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", HOOKED)
def test_two_ranks(name: str, schedule: str) -> None:
    if name == "Extracted":
        pytest.importorskip("torchvision")
    setting = HookedSetting(name, "adamw", schedule=schedule)
    expected = run_reference(setting)
    assert_learned(expected, setting.build())
    assert_same(expected, run_pipelined(setting))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["Hooked", "HookedInputs", "HookedFed"])
def test_three_ranks(name: str, schedule: str) -> None:
    setting = HookedSetting(name, num_ranks=3, num_stages=3, schedule=schedule)
    assert_same(run_reference(setting), run_pipelined(setting))


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: type[Hooked]) -> None:
    module = kind()
    tracer = Tracer(module, Networks(("student",), ("teacher",)), torch.device("cpu"))
    with pytest.raises(CaptureError, match=REFUSED[kind]) as caught:
        tracer.trace(lambda batch: module.training_step(batch, 0), module.batch(4, 0), 0)
    assert "hooked.py" in str(caught.value)  # the line


def test_a_hook_that_comes_later_is_refused() -> None:
    module, device = Hooked(), torch.device("cpu")
    networks = Networks(("student",), ("teacher",))
    batch = module.batch(4, 0)

    def step(batch: Any) -> Any:
        return module.training_step(batch, 0)

    plan = Tracer(module, networks, device).trace(step, batch, 0)
    runner = StepRunner(module, networks, plan, is_loss_rank=True)
    module.student[0].register_forward_hook(print)
    with pytest.raises(CaptureError, match="came or went"):
        runner.replay(step, batch, 0, lambda *_: torch.zeros(4, 4))


def test_a_prologue_leaves_nothing_in_what_hooks_keep() -> None:
    """Else lists would grow on the ranks that don't compute the loss, which empties them."""
    module, device = Hooked(), torch.device("cpu")
    networks, batch = Networks(("student",), ("teacher",)), module.batch(4, 0)

    def step(batch: Any) -> Any:
        return module.training_step(batch, 0)

    plan = Tracer(module, networks, device).trace(step, batch, 0)
    runner = StepRunner(module, networks, plan, is_loss_rank=False)
    for _ in range(2):
        runner.inputs(step, batch, 0, effects=True)
        runner.effects(step, tuple(tensor.to("meta") for tensor in batch), 0)
        kept = [kept for of_network in module.features.values() for kept in of_network.values()]
        assert kept == [[], [], [], []]


def test_only_what_is_read_travels() -> None:
    module = Hooked()
    tracer = Tracer(module, Networks(("student",), ("teacher",)), torch.device("cpu"))
    plan = tracer.trace(lambda batch: module.training_step(batch, 0), module.batch(4, 0), 0)
    (route,) = plan.routes["student"]
    assert len(route.used) == 3  # the output, and two layers', but not what those were given
