from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.runtime.weights.construction import Construction


class Custom(nn.Module):
    """Whatever constructors do: constants, views, values that are asked for, a second thought."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.layer = nn.Linear(6, 4)
        nn.init.orthogonal_(self.layer.weight)
        nn.init.zeros_(self.layer.bias[:2])
        self.second = nn.Linear(5, 5)
        nn.init.trunc_normal_(self.second.weight, std=0.02)
        nn.init.sparse_(self.second.weight[:3], 0.5)
        torch.manual_seed(6)
        self.third = nn.Conv2d(4, 4, 3)
        nn.init.dirac_(self.third.weight)
        self.token = nn.Parameter(torch.randn(1, 4) * 0.02)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("places", torch.arange(5), persistent=False)
        self.register_buffer("table", torch.ones(3).cumsum(0))
        self.embedding = nn.Embedding(7, 3, padding_idx=2)
        self.numbers = torch.arange(3).tolist()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.token


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def student_and_teacher() -> nn.Module:
    student = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4))
    return nn.ModuleList([student, copy.deepcopy(student).requires_grad_(requires_grad=False)])


def pretrained() -> nn.Linear:
    module = nn.Linear(3, 2)
    state = {"weight": torch.full((2, 3), 0.5, device="cpu"), "bias": torch.ones(2, device="cpu")}
    module.load_state_dict(state)
    return module


def seeded() -> nn.Module:
    torch.manual_seed(7)
    return nn.ModuleList([nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 2)])


MAKERS = (seeded, Custom, transformer, student_and_teacher)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_each_part_gets_the_values_of_a_whole_module(
    make: Callable[[], nn.Module], every: int
) -> None:
    torch.manual_seed(5)
    expected = tensors(make())
    torch.manual_seed(5)
    construction = Construction()
    with construction.record():
        module = make()
    found = tensors(module)
    assert found.keys() == expected.keys()
    assert all(tensor.is_meta for tensor in found.values())
    before = torch.get_rng_state()
    for part in range(every):  # as ranks do, each its own part
        names = list(found)[part::every]
        for name, value in zip(
            names, construction.values(map(found.__getitem__, names)), strict=True
        ):
            assert torch.equal(value, expected[name]), name
            assert value.dtype == expected[name].dtype
    assert torch.equal(torch.get_rng_state(), before)


def test_copied_values_are_kept() -> None:
    construction = Construction()
    with construction.record(), pytest.warns(UserWarning, match="no-op"):
        module = pretrained()
    (value,) = construction.values([module.weight])
    assert torch.equal(value, torch.full((2, 3), 0.5))


def test_values_follow_the_random_state_of_another() -> None:
    states, values = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        construction = Construction()
        with construction.record():
            layer = nn.Linear(3, 2)
        states.append(construction.random_states)
        construction.random_states = states[0]
        values.append(construction.values([layer.weight])[0])
    assert torch.equal(values[0], values[1])


def test_other_tensors_are_not_known() -> None:
    construction = Construction()
    with construction.record():
        layer = nn.Linear(3, 2)
    assert construction.knows(layer.weight)
    assert not construction.knows(nn.Linear(3, 2, device="meta").weight)
    construction.forget()
    assert not construction.knows(layer.weight)


def test_memory_is_that_of_the_part() -> None:
    construction = Construction()
    with construction.record():
        layers = [nn.Linear(50, 50) for _ in range(4)]
    (value,) = construction.values([layers[3].weight])
    assert value.untyped_storage().nbytes() == value.nbytes == layers[3].weight.nbytes
