"""Blocks between named boundaries are the network's own parts, and give what it gives."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe import BlockwiseDistillation
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.modes.relay.blocks import blocks_between, infer_shapes, pair_blocks


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.BatchNorm2d(after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).relu() + self.skip(x)


class Net(nn.Module):
    """No list says what its blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1, self.layer2 = Residual(4, 5), Residual(5, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)) * self.scale)
        return self.head(x.mean((2, 3)))


class Module(nn.Module):
    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student


def mse(out: Tensor, target: Tensor, block: int, batch: Any) -> Tensor:
    return nn.functional.mse_loss(out, target)


@pytest.mark.parametrize("training", [True, False])
def test_blocks_give_what_the_network_gives(training: bool) -> None:
    torch.manual_seed(0)
    net, x = Net().train(training), torch.randn(2, 3, 4, 4)
    expected = copy.deepcopy(net)(x)
    blocks = [b for _, b in blocks_between(net, "student", x, ["layer1", "layer2", "head"])]
    torch.testing.assert_close(nn.Sequential(*blocks)(x), expected)
    owned = [list(block.parameters()) for block in blocks]
    assert sum(map(len, owned)) == len(list(net.parameters()))
    assert owned[0][0] is net.stem.weight
    assert any(p is net.scale for p in owned[1])  # what the network owns itself
    assert net.layer1.norm in set(blocks[1].modules())
    assert net.layer2.norm not in set(blocks[1].modules())
    assert net.layer1.norm.running_mean is next(iter(blocks[1].buffers()))


def test_pairs_have_the_networks_names_and_shapes() -> None:
    names = {"teacher": ["layer1", "layer2"]}
    rest = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2))
    student = nn.ModuleList([nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1), rest])
    x = torch.zeros(2, 3, 4, 4)
    pairs = pair_blocks(Module(Net().eval(), student), x, names)
    assert [pair.teacher_name for pair in pairs] == ["teacher.stem", "teacher.layer1",
                                                     "teacher.layer2"]  # fmt: skip
    assert [pair.name for pair in pairs] == ["student.0", "student.1", "student.2"]
    shapes = infer_shapes(pairs, mse, x, (x,))
    assert [spec.shape for spec in shapes.inputs] == [(3, 4, 4), (4, 4, 4), (5, 4, 4), (2,)]


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (["layer9"], r"no block can begin with 'layer9'.*it has no submodule 'layer9'.*layer1"),
        (["layer2", "layer1"], "no block can begin with 'layer1'.*in their order"),
        (["stem"], "no block can begin with 'stem'"),
    ],
)
def test_boundaries_that_there_are_not(boundaries: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        blocks_between(Net(), "teacher", torch.zeros(2, 3, 4, 4), boundaries)


@pytest.mark.parametrize("boundaries", [["layer1"], {"teachers": ["layer1"]}])
def test_boundaries_of_no_network(boundaries: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"block_boundaries=.*write \{'teacher': \["):
        pair_blocks(Module(Net(), Net()), torch.zeros(2, 3, 4, 4), boundaries)


def test_a_boundary_within_a_residual_block() -> None:
    x = torch.zeros(2, 3, 4, 4)
    pairs = pair_blocks(
        Module(Net().eval(), nn.ModuleList([nn.Identity(), nn.Identity()])),
        x,
        {"teacher": ["layer1.skip"]},
    )
    with pytest.raises(ConfigurationError, match="block 0 of the teacher ends where 2 tensors"):
        infer_shapes(pairs, mse, x, (x,))


def test_copies_of_a_module_have_blocks_of_their_own() -> None:
    class Found(BlockwiseDistillation, Module):
        block_boundaries = {"teacher": ["layer1"], "student": ["layer1"]}  # noqa: RUF012

    module: Any = Found(Net(), Net())
    x = torch.zeros(2, 3, 4, 4)
    assert module.block_pairs(x) is module.block_pairs(x)  # recorded once
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module._known_pairs))):  # noqa: S301
        if other is not None:
            assert next(other.block_pairs(x)[0].student.parameters()) is other.student.stem.weight
    module.student = Net()
    assert next(module.block_pairs(x)[0].student.parameters()) is module.student.stem.weight
