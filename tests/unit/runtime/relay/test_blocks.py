"""Finding blocks, refusing those that don't fit, and what losses read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from lightning_tspipe import BlockwiseDistillation, BlockwiseRelay
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.modes.relay.blocks import BlockPair, infer_shapes, pair_blocks


class Module(nn.Module):
    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student


class Stack(nn.Module):
    """Its blocks are neither a Sequential nor a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def pipeline_blocks(self) -> list[nn.Module]:
        return [self.first, self.second]


def mse(out: Tensor, target: Tensor, block: int, batch: Any) -> Tensor:
    return mse_loss(out, target)


def linears(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def pairs_of(teacher: nn.Module, student: nn.Module) -> tuple[BlockPair, ...]:
    return pair_blocks(Module(teacher, student), torch.zeros(2, 3))


def test_blocks_are_found() -> None:
    pairs = pairs_of(Stack(), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert [pair.name for pair in pairs] == ["student.0", "student.1"]
    pairs = pairs_of(linears(2, 2, 2), Stack())
    assert [pair.name for pair in pairs] == ["student.first", "student.second"]


def test_networks_without_equally_many_blocks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the teacher has 2 blocks and the student 3"):
        pairs_of(linears(2, 2, 2), linears(2, 2, 2, 2))
    with pytest.raises(ConfigurationError, match=r"the teacher \(Linear\) has no blocks"):
        pairs_of(nn.Linear(2, 2), linears(2, 2))
    with pytest.raises(ConfigurationError, match="has no network `teacher`"):
        pair_blocks(linears(2, 2), torch.zeros(2, 2))


def test_shapes_that_differ_are_refused() -> None:
    pairs = pairs_of(linears(3, 4, 5), linears(3, 4, 6))
    x = torch.zeros(7, 3)
    with pytest.raises(
        ConfigurationError,
        match=r"block 1 \(student.1\): the student returns shape \(7, 6\) and the teacher \(7, 5\)",
    ):
        infer_shapes(pairs, mse, x, (x,))


def test_shapes_and_fields_are_found_without_values() -> None:
    def loss(out: Tensor, target: Tensor, block: int, batch: Any) -> Tensor:
        return mse_loss(out, target) + (cross_entropy(out, batch["labels"]) if block else 0.0)

    x = torch.zeros(7, 3)
    batch = {"pictures": x, "labels": torch.zeros(7, dtype=torch.long), "name": "train"}
    pairs = pairs_of(linears(3, 4, 5), linears(3, 4, 5))
    shapes = infer_shapes(pairs, loss, x, batch)
    assert [spec.shape for spec in shapes.inputs] == [(3,), (4,), (5,)]
    assert shapes.input_spec(1, 2).shape == (2, 4)
    assert shapes.fields == ((), (1,))  # the labels are the second leaf of the batch


class Chosen(nn.Linear):
    """Looks at values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.sum())


def test_blocks_that_need_values() -> None:
    x = torch.zeros(7, 3)
    networks = [nn.Sequential(Chosen(3, 4), nn.Linear(4, 5)) for _ in range(2)]
    shapes = infer_shapes(pairs_of(*networks), mse, x, (x,))
    assert [spec.shape for spec in shapes.inputs] == [(3,), (4,), (5,)]


def test_a_block_that_loses_the_batch_is_refused() -> None:
    pairs = pairs_of(nn.Sequential(nn.Flatten(0)), nn.Sequential(nn.Flatten(0)))
    with pytest.raises(ConfigurationError, match=r"block 0 .* has shape \(21,\) for 7 samples"):
        infer_shapes(pairs, mse, torch.zeros(7, 3), ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "mode='fast': choose one of tr, dpu"),
        ({"run_ahead": -1}, "run_ahead=-1"),
        ({"profile_steps": 0}, "profile_steps=0"),
        ({"widths": [1, 2]}, "widths without partition"),
        ({"partition": [1, 2], "widths": [1]}, "give each stage a number of blocks"),
        ({"partition": [1, 2], "widths": [1, 2]}, "mode='dpu' has 1 device per stage"),
        ({"mode": "ir", "partition": [1, 2]}, "puts all blocks on all devices"),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BlockwiseRelay(**arguments)


def test_modules_of_another_kind_are_refused() -> None:
    class Own(BlockwiseDistillation, Module):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            """Its own."""

    relay: Any = BlockwiseRelay()
    with pytest.raises(ConfigurationError, match="class Module"):
        relay.setup(None, Module(linears(2, 2), linears(2, 2)), "fit")
    with pytest.raises(ConfigurationError, match=r"Own overrides training_step"):
        relay.setup(None, Own(linears(2, 2), linears(2, 2)), "fit")
