"""A step that replaces a network is refused by what its source says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from lightning_tspipe.capture.rebinding import refuse_rebinding
from lightning_tspipe.errors import CaptureError


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(2, 2))
        self.teacher = copy.deepcopy(self.student)
        self.scale = 1.0

    def reset(self) -> None:
        self.teacher = copy.deepcopy(self.student)

    def harmless(self) -> None:
        self.scale, other = 0.5, self.teacher
        other.requires_grad_(requires_grad=False)


class Directly(Module):
    def training_step(self, batch: Any) -> None:
        self.teacher: Any = copy.deepcopy(self.student)


class Indirectly(Module):
    def training_step(self, batch: Any) -> None:
        self.now_and_then()

    def now_and_then(self) -> None:
        self.reset()


class Never(Module):
    def training_step(self, batch: Any) -> None:
        self.harmless()
        self.training_step(batch)


@pytest.mark.parametrize(
    ("module", "names", "where"),
    [
        (Directly(), ("student", "teacher"), "Directly.training_step"),
        (Indirectly(), ("student", "teacher"), "Indirectly.reset"),
        (Indirectly(), ("student.0", "teacher.0"), "Indirectly.reset"),
    ],
)
def test_refused(module: nn.Module, names: tuple[str, ...], where: str) -> None:
    with pytest.raises(CaptureError, match=rf"{where} puts .* place of self.teacher.*load_state"):
        refuse_rebinding(module, names)


def test_what_the_step_does_not_call_or_replace_is_fine() -> None:
    refuse_rebinding(Never(), ("student", "teacher"))
    refuse_rebinding(Directly(), ("student",))


def test_without_source_nothing_is_found() -> None:
    made = type("Made", (Module,), {"training_step": eval("lambda self, batch: self.reset()")})  # noqa: S307 - has no source
    with pytest.raises(CaptureError, match="reset"):
        refuse_rebinding(Indirectly(), ("teacher",))
    refuse_rebinding(made(), ("teacher",))
