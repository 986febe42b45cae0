"""Modules that need values run on zeros where the others run on shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_tspipe.networks.fakes import Fakes
from lightning_tspipe.networks.swap import meta_like, without_values
from tests.integration.test_mixing import Routed

FAKES = Fakes(torch.device("cpu"))


class Grouped(nn.Module):
    """Calls a function that torch refuses on fakes of float32, and runs on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([1, len(x)], dtype=torch.int32)
        made: Tensor = torch.nn.functional.grouped_mm(x, self.weight, offs=ends)
        return made


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(3, 3)


def fake_like(tensor: Tensor) -> Tensor:
    return FAKES.from_tensor(tensor.detach())


@pytest.mark.parametrize("make", [meta_like, fake_like])
@pytest.mark.parametrize("kind", [Routed, Grouped])
def test_shapes(kind: type[nn.Module], make: Callable[[Tensor], Tensor]) -> None:
    network = nn.Sequential(nn.Linear(4, 8), kind(), nn.Linear(8, 2)).float()
    x = make(torch.zeros(5, 4))
    with without_values(network.modules(), make):
        made = network(x)
    assert type(made) is type(x)
    assert (made.shape, made.device, made.requires_grad) == ((5, 2), x.device, True)
    assert network(torch.zeros(5, 4)).device.type == "cpu"


def test_their_operations_are_counted() -> None:
    network = nn.Sequential(Routed())
    with without_values(network.modules()), FlopCounterMode(display=False) as counter:
        network(torch.empty(5, 8, device="meta"))
    # Once in vain on shapes, which ends behind the router, and once on zeros.
    assert counter.get_total_flops() == 2 * (2 * 5 * 8 * 3) + 2 * 5 * 8 * 8


def test_what_fails_on_zeros_too_is_told_as_it_was() -> None:
    network = nn.Sequential(Wrong())
    with without_values(network.modules()), pytest.raises(RuntimeError, match="reduction dim"):
        network(torch.empty(5, 8, device="meta"))


class Untouched(nn.Module):
    def forward(self) -> Tensor:
        raise RuntimeError("its own reason")


def test_what_is_given_no_tensor_fails_as_it_does() -> None:
    network = Untouched()
    with without_values([network]), pytest.raises(RuntimeError, match="its own reason"):
        network()
