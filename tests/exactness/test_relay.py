"""Blockwise distillation, split in any way, gives block by block what one device gives."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from lightning_tspipe.planning.relay import distributions
from tests.exactness.relay_reference import train_blocks
from tests.exactness.relay_threads import Result, Split, run_split, sgd

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@cache
def expected(num_blocks: int, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    split = Split("dpu", (0, num_blocks), (1,), sizes)
    module = split.build()
    train_blocks(
        list(module.teacher), list(module.student), module.block_loss, sgd, [split.batches()]
    )
    return module.state_dict()


def check(split: Split) -> Result:
    result = run_split(split)
    for name, value in expected(split.cuts[-1], split.sizes).items():
        torch.testing.assert_close(result.weights[name], value, **CLOSE, msg=f"{split} {name}")
    seen: dict[str, Tensor] = {}
    for copy in result.copies:  # of a shared block all ranks have the same bits
        for name, value in copy.items():
            assert torch.equal(seen.setdefault(name, value), value), (split, name)
    return result


def drawn(number: int, seed: int) -> list[Split]:
    """Distributions of 2 to 8 blocks over 1 to 4 ranks."""
    draw = random.Random(seed)  # noqa: S311 - no secrets
    found = []
    for _ in range(number):
        num_blocks, num_ranks = draw.randint(2, 8), draw.randint(1, 4)
        plan = draw.choice(list(distributions(num_blocks, num_ranks)))
        sizes = tuple(draw.randint(2, 9) for _ in range(3))
        run_ahead = draw.randint(0, 3)
        found.append(Split("ahd", plan.cuts, plan.widths, sizes, run_ahead))
    return found


@pytest.mark.parametrize("split", drawn(5, seed=0), ids=str)
def test_distributions(split: Split) -> None:
    check(split)


@pytest.mark.slow
@pytest.mark.parametrize("split", drawn(40, seed=1), ids=str)
def test_more_distributions(split: Split) -> None:
    check(split)


@pytest.mark.parametrize("widths", [(3, 2), (2, 3), (1, 3)], ids=str)
def test_relay_between_any_widths(widths: tuple[int, ...]) -> None:
    """Also of batches that are smaller than a stage is wide."""
    result = check(Split("ahd", (0, 1, 3), widths, (7, 2, 5)))
    assert result.forwards == dict.fromkeys(range(3), 14)


@pytest.mark.parametrize("run_ahead", [0, 1, 5])
def test_decoupled_updates(run_ahead: int) -> None:
    result = check(Split("dpu", (0, 1, 2, 4), (1, 1, 1), run_ahead=run_ahead))
    assert result.forwards == dict.fromkeys(range(4), 22)  # each block once for each sample


def test_barrier() -> None:
    check(Split("tr", (0, 2, 4), (1, 1), barrier=True))


def test_internal_relaying() -> None:
    assert check(Split("ir", (0, 4), (3,))).forwards == dict.fromkeys(range(4), 22)


def test_baselines_run_the_teacher_from_its_beginning() -> None:
    shared = check(Split("dp", (0, 3), (2,)))
    assert shared.forwards == {0: 3 * 22, 1: 2 * 22, 2: 22}
    packed = check(Split("ls", (0, 2, 3), (1, 1)))
    assert packed.forwards == {0: 2 * 22, 1: 2 * 22, 2: 22}
    relayed = check(Split("dpu", (0, 2, 3), (1, 1)))
    assert shared.bytes_loaded == 3 * relayed.bytes_loaded
    assert packed.bytes_loaded == 2 * relayed.bytes_loaded
