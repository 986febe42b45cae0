"""A step that replaces a network is refused by what its code says."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
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


def test_it_needs_no_source() -> None:
    made = type("Made", (Module,), {"training_step": eval("lambda self, batch: self.reset()")})  # noqa: S307 - has no source
    with pytest.raises(CaptureError, match=r"Made\.reset"):
        refuse_rebinding(made(), ("teacher",))


def test_an_editor_may_have_changed_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a script that is starting: other lines than those that run are where they were."""
    path = tmp_path / "edited_while_starting.py"
    head = f"from {__name__} import Module\n\n\nclass Edited(Module):\n"
    path.write_text(f"{head}    def training_step(self, batch):\n        self.harmless()\n")
    monkeypatch.syspath_prepend(tmp_path)
    edited = importlib.import_module(path.stem).Edited
    path.write_text(f"{head}    def training_step(self, batch):\n        self.teacher = None\n")
    refuse_rebinding(edited(), ("teacher",))


class Inside(Module):
    def training_step(self, batch: Any) -> None:
        def replace() -> None:
            self.teacher = copy.deepcopy(self.student)

        replace()


class OfAPart(Module):
    def training_step(self, this: Any, batch: Any) -> None:
        this.teacher = batch
        self.student[0].weight.data = batch
        self.student.extra = batch


def test_functions_within_it_and_parts_of_networks() -> None:
    with pytest.raises(CaptureError, match=r"Inside\.training_step"):
        refuse_rebinding(Inside(), ("teacher",))
    refuse_rebinding(OfAPart(), ("student", "teacher"))
