"""Which networks are found by running a step once."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.capture.discovery import Finder

Step = Callable[["Module", Tensor], Any]


class Counted(nn.Module):
    """Needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x[: int(x.abs().sum() > 0) + 1] * self.weight


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.probe = nn.Linear(3, 3), nn.Linear(3, 5), nn.Linear(3, 2)
        self.late_backbone, self.late_head = nn.Linear(3, 3), nn.Linear(3, 5)
        self.frozen, self.other = nn.Linear(3, 4), nn.Linear(3, 1)
        self.counted = Counted()
        for name in ("late_backbone", "late_head", "frozen"):
            self.get_submodule(name).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))


def masked(m: Module, x: Tensor) -> Any:
    """Heads read rows that the step chooses: they and their averages stay beside the loss."""
    mask = torch.rand(len(x)) > 0.3
    late = m.late_head(m.late_backbone(x)[mask])
    return (m.head(m.backbone(x)[mask]) - late).square().sum()


def half(m: Module, x: Tensor) -> Any:
    """One half of a pair stays beside the loss, and so does the other."""
    late = m.late_head(m.late_backbone(x))
    mask = torch.rand(len(x)) > 0.3
    return (m.head(m.backbone(x)[mask]) - late[mask]).square().sum()


@pytest.mark.parametrize(
    ("step", "student", "teacher"),
    [
        (lambda m, x: m.head(m.backbone(x)) + m.late_head(m.late_backbone(x)),
         "backbone head", "late_backbone late_head"),
        (lambda m, x: m.head(m.backbone(x)), "backbone head", "late_backbone late_head"),
        (lambda m, x: m.backbone(x).sum() + m.frozen(x).sum(), "backbone", "frozen late_backbone"),
        (lambda m, x: m.probe(m.backbone(x).detach()), "backbone", "late_backbone"),
        (lambda m, x: m.head(m.backbone(x)).sum() + m.other(m.backbone(x)).sum(),
         "backbone head other", "late_backbone late_head"),
        (lambda m, x: m.head(m.backbone(x) + m.backbone(-x)), "backbone head",
         "late_backbone late_head"),
        (lambda m, x: m.head(m.backbone(x) * m.scale), "backbone", "late_backbone"),
        (lambda m, x: m.head(m.frozen(x)[:, :3]), "head", "frozen late_head"),
        (lambda m, x: m.head(m.late_backbone(x) + x), "head", "late_backbone late_head"),
        (lambda m, x: m.head(m.backbone(x) + m.frozen(x)[:, :3]).sum(), "backbone head",
         "frozen late_backbone late_head"),
        (lambda m, x: m.head(torch.cat([m.backbone(x)[:, :1], x[:, 1:]], 1)), "backbone head",
         "late_backbone late_head"),
        (lambda m, x: m.counted(m.backbone(x)).sum(), "backbone", "late_backbone"),
        (masked, "backbone", "late_backbone"),
        (half, "backbone", "late_backbone"),
    ],
    ids=[
        "averages", "an average that is not called", "frozen", "detached", "two heads", "two calls",
        "a parameter", "read by a head", "an average read by a head", "of both", "and a field",
        "values", "masked", "half a pair",
    ],
)  # fmt: skip
def test_found(step: Step, student: str, teacher: str) -> None:
    module = Module()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    finder = Finder(module, torch.device("cpu"))
    found = finder.find(lambda x: step(module, x), torch.randn(4, 3), seed=0)
    assert " ".join(found.student) == student
    assert " ".join(sorted(found.teacher)) == teacher
    assert all(map(torch.equal, before, module.parameters()))


def test_what_averages_what() -> None:
    module = Module()
    found = Finder(module, torch.device("cpu")).find(
        lambda x: module.head(module.backbone(x)), torch.randn(4, 3), seed=0
    )
    assert found.pairs == {"late_backbone": "backbone", "late_head": "head"}


class OnFrozen(nn.Module):
    """A small head on a frozen backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(
            requires_grad=False
        )
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(4, 2))

    def training_step(self, batch: Tensor) -> Tensor:
        made: Tensor = self.head(self.backbone(batch))
        return made.square().mean()


@pytest.mark.parametrize(("num_ranks", "student"), [(2, ("head",)), (3, ("backbone",))])
def test_what_has_fewer_layers_than_there_are_ranks(
    num_ranks: int, student: tuple[str, ...]
) -> None:
    module = OnFrozen()
    finder = Finder(module, torch.device("cpu"), num_ranks=num_ranks)
    assert finder.find(module.training_step, torch.ones(3, 4), seed=0).student == student


class Averaged(nn.Module):
    """Holds a network and the average of it, as stable-pretraining's wrappers do."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = network, deepcopy(network).requires_grad_(requires_grad=False)

    def forward_teacher(self, x: Tensor) -> Any:
        with torch.no_grad():
            return self.teacher(x)

    def forward(self, x: Tensor) -> Any:
        return self.student(x), self.forward_teacher(x)


class Adapted(nn.Module):
    """A frozen network and what is trained on it: one network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4).requires_grad_(requires_grad=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.body(x))
        return made


class Holding(nn.Module):
    def __init__(self, *, is_nested: bool = False) -> None:
        super().__init__()
        self.backbone = Averaged(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Adapted()))
        self.head, self.predictor = Averaged(nn.Linear(3, 3)), nn.Linear(3, 3)
        if is_nested:
            self.backbone = Averaged(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
            self.all = nn.ModuleDict({"backbone": self.backbone, "head": self.head})
            del self.backbone, self.head

    def training_step(self, batch: Tensor) -> Any:
        parts = self.all if hasattr(self, "all") else vars(self)["_modules"]
        one, late = parts["backbone"](batch)
        made = self.predictor(parts["head"].student(one))
        return (made - parts["head"].forward_teacher(late)).square().mean()


@pytest.mark.parametrize("within", ["", "all."])
def test_what_holds_a_network_and_its_average(within: str) -> None:
    module = Holding(is_nested=bool(within))
    found = Finder(module, torch.device("cpu")).find(module.training_step, torch.ones(3, 3), seed=0)
    assert sorted(found.student) == [
        f"{within}backbone.student",
        f"{within}head.student",
        "predictor",
    ]
    assert sorted(found.teacher) == [f"{within}backbone.teacher", f"{within}head.teacher"]
    pairs = {f"{within}{name}.teacher": f"{within}{name}.student" for name in ("backbone", "head")}
    assert found.pairs == pairs


def test_what_holds_a_frozen_part_of_a_network() -> None:
    module = Module()
    module.backbone = Adapted()  # type: ignore[assignment]
    found = Finder(module, torch.device("cpu")).find(
        lambda x: module.head(module.backbone(x)), torch.ones(3, 3), seed=0
    )
    assert found.student == ("backbone", "head")
