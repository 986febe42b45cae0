"""Atoms that do the same are of one kind, and no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_tspipe.profiling.kinds import kind_of
from tests.unit.networks.cutting import cut


def kinds(network: nn.Module, *inputs: Tensor) -> list[str | None]:
    program = cut(network, *inputs)
    found, received = [], inputs
    for atom in range(len(program.atoms)):
        found.append(kind_of(program, atom, received))
        received, _ = program.run(received, atom, atom + 1)
    return found


class Layer(nn.Module):
    def __init__(
        self, width: int = 6, heads: int = 2, rate: float = 0.1, slope: float = 0.01
    ) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, heads, batch_first=True)
        self.inner, self.outer = nn.Linear(6, width), nn.Linear(width, 6)
        self.drop, self.slope = nn.Dropout(rate), slope

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = functional.layer_norm(x, (6,))
        return x + self.drop(self.outer(functional.leaky_relu(self.inner(x), self.slope)))


def of_layer(layer: nn.Module) -> list[str | None]:
    return kinds(nn.Sequential(layer), torch.randn(2, 3, 6))


@cache
def usual() -> list[str | None]:
    return of_layer(Layer())


def test_equal_layers_are_of_one_kind() -> None:
    few, many = (
        kinds(nn.Sequential(*(Layer() for _ in range(number))), torch.randn(2, 3, 6))
        for number in (3, 5)
    )
    assert len(many) > len(few)
    assert None not in many
    assert set(many) == set(few)


def frozen(layer: nn.Module) -> nn.Module:
    layer.inner.requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    "other",
    [
        lambda: Layer(width=8),
        lambda: Layer(heads=3),
        lambda: Layer(rate=0.2),
        lambda: Layer(slope=0.1),
        lambda: Layer().eval(),
        lambda: frozen(Layer()),
    ],
    ids=["width", "heads", "rate", "argument", "mode", "frozen"],
)
def test_what_differs_is_of_another_kind(other: Callable[[], nn.Module]) -> None:
    assert usual() != of_layer(other())


def test_order_in_memory_and_type_count() -> None:
    convolution = nn.Conv2d(3, 3, 1)
    x = torch.randn(2, 3, 4, 4)
    first = kinds(convolution, x)
    assert first != kinds(convolution, x.to(memory_format=torch.channels_last))
    assert first != kinds(convolution.double(), x.double())


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(x)  # type: ignore[no-untyped-call]


def test_what_is_not_torchs_is_like_nothing_else() -> None:
    found = kinds(nn.Sequential(nn.Linear(6, 6), Own(), nn.Linear(6, 6)), torch.randn(2, 6))
    assert None in found
    assert not all(kind is None for kind in found)


def test_a_hook_is_like_nothing_else() -> None:
    layer = nn.Linear(6, 6)
    layer.register_forward_pre_hook(lambda _, given: given)
    assert kinds(nn.Sequential(nn.Linear(6, 6), layer), torch.randn(2, 6))[-1] is None
