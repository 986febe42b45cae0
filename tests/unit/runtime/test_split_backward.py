from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from lightning_tspipe.runtime.stages.split_backward import SplitBackward


class Tied(nn.Module):
    """One matrix is used by two products and a cheap call, one bias by two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.first(x).tanh(), self.third.weight, self.second.bias)
        return self.second(x) + self.third.weight.sum(0)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.randn(4, 1, 1))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.norm(self.conv(x)).relu_()  # type: ignore[no-any-return]


def composed_weights() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.utils.parametrizations.weight_norm(layer)
    return nn.Sequential(layer, nn.GELU(), layer)


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def frozen_in_part() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    network[2].requires_grad_(False)
    network[3].bias.requires_grad_(False)
    return network


CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (3, 4)),
    (lambda: nn.Sequential(Residual(), Residual()), (2, 4, 5, 5)),
    (Tied, (3, 4)),
    (composed_weights, (3, 4)),
    (attention, (2, 3, 4)),
    (frozen_in_part, (3, 4)),
    (nn.Identity, (3, 4)),
]


def prepared(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    network = build().double()
    twin = copy.deepcopy(network)
    for parameter in (*network.parameters(), *twin.parameters()):
        if parameter.requires_grad and parameter.ndim == 1:
            parameter.grad = torch.ones_like(parameter)  # gradients add up
    return network, twin


def assert_gradients_equal(network: nn.Module, twin: nn.Module) -> None:
    for (name, mine), theirs in zip(network.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize(("build", "shape"), CASES)
def test_the_halves_leave_the_gradients_of_a_whole_backward(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    network, twin = prepared(build)
    mine = torch.randn(shape, dtype=torch.float64).requires_grad_()
    theirs = mine.detach().clone().requires_grad_()
    expected = twin(theirs)
    seed = torch.randn_like(expected)
    expected.backward(seed)
    split = SplitBackward([network(mine)], [mine])
    (found,) = split.input_half([seed])
    assert mine.grad is None
    split.weight_half()
    torch.testing.assert_close(found, theirs.grad, rtol=1e-12, atol=1e-13)
    assert_gradients_equal(network, twin)


def test_heavy_calls_wait_for_the_weight_half() -> None:
    network = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    split = SplitBackward([network(x)], [x])
    split.input_half([torch.ones(2, 2)])
    done = [name for name, parameter in network.named_parameters() if parameter.grad is not None]
    assert done == ["1.weight", "1.bias"]
    split.weight_half()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_without_an_input_to_differentiate_the_first_half_does_all() -> None:
    network = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    split = SplitBackward([network(x)], [x])
    assert split.input_half([torch.ones(3, 2)]) == (None,)
    assert network.weight.grad is not None
    split.weight_half()


def test_several_inputs_and_outputs_of_which_some_are_unused() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    a, b, c = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    used, unused, constant = first(a) + b, second(a), second(c).detach()
    split = SplitBackward([used, unused, constant], [a, b, c])
    found = split.input_half([torch.ones(3, 4), None, None])
    split.weight_half()
    assert torch.equal(found[0], torch.ones(3, 4) @ first.weight)  # type: ignore[arg-type]
    assert torch.equal(found[1], torch.ones(3, 4))  # type: ignore[arg-type]
    assert found[2] is None
    assert first.weight.grad is not None
    assert second.weight.grad is None


def test_an_output_that_depends_on_parameters_only() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    split = SplitBackward([layer(x), layer.weight.square().sum()], [x])
    split.input_half([torch.zeros(3, 4), torch.ones(())])
    split.weight_half()
    torch.testing.assert_close(layer.weight.grad, 2 * layer.weight.detach())


def double(calls: list[str], name: str, gradient: Tensor) -> Tensor:
    calls.append(name)
    return gradient * 2


def note(calls: list[str], name: str, _: Tensor) -> None:
    calls.append(f"after {name}")


def test_hooks_on_parameters_run_once() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    calls: list[str] = []
    for name, parameter in network.named_parameters():
        parameter.register_hook(partial(double, calls, name))
        parameter.register_post_accumulate_grad_hook(partial(note, calls, name))
    twin = copy.deepcopy(network)
    x = torch.randn(3, 4, requires_grad=True)
    seed = torch.randn(3, 4)
    split = SplitBackward([network(x)], [x])
    split.input_half([seed])
    split.weight_half()
    names = [name for name, _ in network.named_parameters()]
    assert sorted(calls) == sorted([*names, *(f"after {name}" for name in names)])
    twin(x).backward(seed)
    for mine, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad * 2)


def test_nothing_is_kept_after_the_weight_half() -> None:
    layer = nn.Linear(4, 4)
    kept: list[bool] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            del ctx
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            del ctx
            return gradients[0]

    x = torch.randn(3, 4, requires_grad=True)
    output = Watched.apply(layer(x))
    node = output.grad_fn
    node.metadata["alive"] = _Flag(kept)
    split = SplitBackward([output], [x])
    split.input_half([torch.ones(3, 4)])
    split.weight_half()
    del output, node
    assert kept == [True]


class _Flag:
    def __init__(self, told: list[bool]) -> None:
        self._told = told

    def __del__(self) -> None:
        self._told.append(True)
