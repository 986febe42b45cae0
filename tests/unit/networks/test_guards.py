"""A network that has changed since it was recorded is recorded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.errors import PartitionError
from tests.unit.networks.cutting import cut


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = 0.5
        self.scales = [1.0, 2.0]
        self._uses_gelu = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) / self.temperature
        return nn.functional.gelu(x) if self._uses_gelu else x * self.scales[-1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.head = Head()
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x if self.skips else self.head(x)


def set_(name: str, value: Any) -> Callable[[Net], object]:
    return lambda net: setattr(net.head, name, value)


CHANGES: dict[str, Callable[[Net], object]] = {
    "temperature": set_("temperature", 0.25),
    "list": lambda net: net.head.scales.append(3.0),
    "branch": set_("_uses_gelu", True),
    "module": set_("linear", nn.Linear(4, 4)),
    "hook": lambda net: net.stem.register_forward_hook(lambda *args: args[2] + 1),
    "weights": lambda net: nn.init.zeros_(net.head.linear.weight),
    "mode": lambda net: net.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str) -> None:
    net, x = Net(), torch.randn(3, 4)
    chain = cut(net, x)
    for _ in range(2):
        (found,) = chain.run((x,), 0, len(chain.atoms))[0]
        assert torch.equal(found, net(x))
        CHANGES[change](net)
        (found,) = chain.run((x,), 0, len(chain.atoms))[0]
        assert torch.equal(found, net(x))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda net: setattr(net, "skips", True), "`skips` was False and is True now"),
        (lambda net: net.head.register_forward_hook(print), "a hook was registered"),
        (lambda net: setattr(net, "head", nn.Identity()), "`head` is another module now"),
    ],
)
def test_what_cannot_be_served_by_the_same_cut_says_what_has_changed(
    change: Callable[[Net], object], why: str
) -> None:
    net, x = Net(), torch.randn(3, 4)
    chain = cut(net, x)
    change(net)
    with pytest.raises(PartitionError, match=why):
        chain.run((x,), 0, len(chain.atoms))


def test_a_change_back_is_found_and_not_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Net(), torch.randn(3, 4)
    chain = cut(net, x)
    net.head.temperature = 2.0
    (hot,) = chain.run((x,), 0, len(chain.atoms))[0]
    monkeypatch.setattr("lightning_tspipe.networks.program.record", None)
    for temperature in (0.5, 2.0):
        net.head.temperature = temperature
        (found,) = chain.run((x,), 0, len(chain.atoms))[0]
        assert torch.equal(found, hot) == (temperature == 2.0)
        assert torch.equal(found, net(x))


class Choosing(nn.Module):
    """What is read behind both layers decides what passes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.negates = False

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        other = -one
        return self.second(other if self.negates else one)


def test_what_later_layers_read_decides_what_earlier_ones_pass_on() -> None:
    net, x = Choosing(), torch.randn(3, 4)
    chain = cut(net, x)
    for negates in (False, True):
        net.negates = negates
        values: tuple[Tensor, ...] = (x,)
        for atom in range(len(chain.atoms)):
            values, _ = chain.run(values, atom, atom + 1)
        assert torch.equal(values[0], net(x))


def test_inputs_of_another_type_are_recorded_again() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.float()).to(x.dtype)  # type: ignore[no-any-return]

    net, x = Casting(), torch.randn(3, 4)
    chain = cut(net, x)
    for given in (x, x.double(), x):
        (found,) = chain.run((given,), 0, len(chain.atoms))[0]
        assert found.dtype == given.dtype
        assert torch.equal(found, net(given))
