"""Where networks are cut that pass on more than a tensor or two."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.unit.networks.cutting import cut


class Layer(nn.Module):
    """With a bias and a mask that all layers share, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, small: list[Tensor]) -> Tensor:
        y = functional.relu(self.up(x)) + torch.stack(small).sum()
        return x + self.down(y)  # type: ignore[no-any-return]


class Biased(nn.Module):
    """Makes small tensors of its input, which all layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        small = [x.sum() * factor for factor in (1e-3, 2e-3, 3e-3, 4e-3, 5e-3)]
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, small)
        return x


def test_small_tensors_that_all_layers_read_forbid_no_cuts() -> None:
    net, x = Biased(), torch.randn(8, 32)
    chain = cut(net, x)
    for layer in range(3):
        assert sum(f"layers.{layer}.up.weight" in a.parameter_names for a in chain.atoms) == 1
    assert max(len(atom.parameter_names) for atom in chain.atoms) == 2
    values: tuple[Tensor, ...] = (x,)
    counts = []
    for atom in range(len(chain.atoms)):
        values, _ = chain.run(values, atom, atom + 1)
        counts.append(len(values))
    assert max(counts) > 5
    assert torch.equal(values[0], net(x))


class Wide(nn.Module):
    """Keeps what each layer makes until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.last = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([layer(x) for layer in self.layers], 1))  # type: ignore[no-any-return]


def test_many_tensors_of_one_size_are_too_much_to_pass_on() -> None:
    chain = cut(Wide(), torch.randn(3, 8))
    assert max(len(atom.parameter_names) for atom in chain.atoms) == 2 * 5


class Rescaled(nn.Module):
    """Draws positions in train mode, which all layers read; in eval mode they are constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(4.0)
        if self.training:
            positions = positions * torch.empty(1).uniform_(0.5, 2.0)
        for layer in self.layers:
            x = functional.relu(layer(x)) + positions
        return x


@pytest.mark.parametrize("training", [True, False])
def test_modes_that_pass_on_different_numbers_of_tensors_have_the_same_atoms(
    training: bool,
) -> None:
    net, x = Rescaled().train(training), torch.randn(3, 4)
    chain = cut(net, x)
    atoms = chain.atoms
    weights = [name for atom in atoms for name in atom.parameter_names if "weight" in name]
    assert len([atom for atom in atoms if atom.parameter_names]) == len(weights) == 3
    torch.manual_seed(0)
    expected = net(x)
    torch.manual_seed(0)
    values: tuple[Tensor, ...] = (x,)
    for atom in range(len(atoms)):
        values, _ = chain.run(values, atom, atom + 1)
    assert torch.equal(values[0], expected)


def test_what_fails_while_it_is_recorded_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(nn.Module):
        """A product that torch refuses for tensors without values, and then runs."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([x.shape[0]], dtype=torch.int32)
            return torch._grouped_mm(x, self.weight, offs=ends)  # type: ignore[no-any-return]

    net = nn.Sequential(nn.Linear(4, 4), Failing(), nn.Linear(4, 4))
    with caplog.at_level(logging.DEBUG):
        assert [len(atom.parameter_names) for atom in cut(net, torch.randn(3, 4)).atoms] == [
            2,
            1,
            2,
        ]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Positioned(nn.Module):
    """Makes positions of a view of a parameter's view, before it looks at its input, and after."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 5, 4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions[:, 1:].reshape(1, 2, 2, 4).permute(0, 3, 1, 2) * 2
        x = self.first(x)
        return self.second(x) + positions.permute(0, 2, 3, 1).reshape(1, 4, 4)  # type: ignore[no-any-return]


def test_what_is_made_of_views_of_a_parameter_is_made_where_it_is_read() -> None:
    net, x = Positioned(), torch.randn(3, 4, 4)
    chain = cut(net, x)
    assert len(chain.atoms) > 1
    values: tuple[Tensor, ...] = (x,)
    for atom in range(len(chain.atoms)):
        values, _ = chain.run(values, atom, atom + 1)
    assert torch.equal(values[0], net(x))
    (found,) = torch.autograd.grad(values[0].sum(), net.positions)
    assert torch.equal(found, torch.autograd.grad(net(x).sum(), net.positions)[0])
