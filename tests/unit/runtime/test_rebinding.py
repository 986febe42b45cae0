"""A module put in the place of a network: the network takes its values, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_tspipe.errors import CaptureError
from lightning_tspipe.runtime.weights.rebinding import keep_networks


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = network()
        self.inner = nn.Sequential(network(), nn.Identity())
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)


@pytest.fixture
def module() -> Iterator[Module]:
    made = Module()
    handle = keep_networks(made, ("student",), ("teacher", "inner.0"))
    yield made
    handle.remove()


def changed(network: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.add_(1)
    return network


def test_it_takes_the_values_and_stays(module: Module) -> None:
    kept, parameters = module.teacher, [*module.teacher.parameters()]
    made = copy.deepcopy(changed(module.student))
    module.teacher = made
    assert module.teacher is kept
    assert all(one is other for one, other in zip(kept.parameters(), parameters, strict=True))
    torch.testing.assert_close(kept.state_dict(), module.student.state_dict(), rtol=0, atol=0)
    assert not any(p.requires_grad for p in kept.parameters())
    # What is done to the other one later is done to it.
    made.eval()
    made[0].weight.data.zero_()  # type: ignore[index]
    assert not kept[1].training  # type: ignore[index]
    assert not kept[0].weight.any()  # type: ignore[index]


def test_inside_of_others(module: Module) -> None:
    kept = module.inner[0]
    module.inner[0] = changed(network())
    assert module.inner[0] is kept
    kept = module.inner
    module.inner = nn.Sequential(changed(network()), nn.Identity())
    assert module.inner is kept


def test_elsewhere_modules_are_replaced(module: Module) -> None:
    module.inner[1] = relu = nn.ReLU()
    assert module.inner[1] is relu
    other = Module()
    other.teacher = made = network()
    assert other.teacher is made


def test_afterwards_it_may_be_another_one() -> None:
    module = Module()
    keep_networks(module, ("student",), ("teacher",)).remove()
    module.teacher = made = network()
    assert module.teacher is made


@pytest.mark.parametrize(
    ("name", "made", "why"),
    [
        ("student", network(), "Optimizers hold the parameters"),
        ("teacher", nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(2)), "other parts or settings"),
        ("teacher", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, eps=1e-3)), "other parts"),
        ("teacher", network().eval(), "other parts or settings"),
    ],
)
def test_refused(module: Module, name: str, made: nn.Module, why: str) -> None:
    kept = getattr(module, name)
    with pytest.raises(CaptureError, match=rf"network '{name}', at .*setattr.*{why}.*load_state"):
        setattr(module, name, made)
    assert getattr(module, name) is kept


def test_values_of_another_rank(module: Module) -> None:
    with pytest.raises(CaptureError, match=r"network 'teacher' .*'weight' are on another rank"):
        module.teacher = network().to("meta")
    module.teacher.to("meta")
    module.teacher = network()  # another rank has it
    assert module.teacher[0].weight.is_meta  # type: ignore[index]
