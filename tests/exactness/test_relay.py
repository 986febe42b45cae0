"""Blockwise distillation, split in any way, gives block by block what one device gives."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.relay.simulated import distributions
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.relay import MODES
from tests.choosing import some_of
from tests.exactness.relay_reference import train_blocks
from tests.exactness.relay_threads import Blocks, Result, Split, run_split, sgd

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@cache
def expected(num_blocks: int, sizes: tuple[int, ...], is_listed: bool) -> dict[str, Tensor]:
    split = Split("dpu", (0, num_blocks), (1,), sizes, is_listed=is_listed)
    module = split.build()
    teachers, students = module.listed(module.teacher), module.listed(module.student)
    train_blocks(teachers, students, module.block_loss, sgd, [split.batches()])
    return module.state_dict()


def check(split: Split) -> Result:
    result = run_split(split)
    for name, value in expected(split.cuts[-1], split.sizes, split.is_listed).items():
        torch.testing.assert_close(result.weights[name], value, **CLOSE, msg=f"{split} {name}")
    seen: dict[str, Tensor] = {}
    for copy in result.copies:  # of a shared block all ranks have the same bits
        for name, value in copy.items():
            assert torch.equal(seen.setdefault(name, value), value), (split, name)
    return result


def drawn(number: int, seed: int) -> list[Split]:
    """Modes, and distributions of 2 to 8 blocks over 1 to 4 ranks."""
    draw = random.Random(seed)  # noqa: S311 - no secrets
    found = []
    for index in range(number):
        mode = MODES[index % len(MODES)]
        num_blocks, num_ranks = draw.randint(2, 8), draw.randint(1, 4)
        plans = [
            plan
            for plan in distributions(num_blocks, min(num_ranks, num_blocks))
            if mode == "ahd"
            or (plan.num_stages == 1 if mode in {"ir", "dp"} else max(plan.widths) == 1)
        ]
        plan = draw.choice(plans)
        sizes = tuple(draw.randint(2, 9) for _ in range(3))
        found.append(
            Split(
                mode, plan.cuts, plan.widths, sizes, draw.randint(0, 3), mode == "tr",
                is_listed=draw.random() < 0.7,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("split", drawn(6, seed=0), ids=str)
def test_distributions(split: Split) -> None:
    check(split)


MORE = drawn(48, seed=1)


@pytest.mark.parametrize("split", some_of(MORE, slow=MORE[::3]), ids=str)
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


def test_blocks_between_named_boundaries() -> None:
    result = check(Split("ahd", (0, 2, 3), (2, 1), is_listed=False))
    assert result.forwards == dict.fromkeys(range(3), 22)


@pytest.mark.parametrize("widths", [(1, 1), (2, 1)], ids=str)
def test_ranks_add_up_numbers_while_the_next_activations_are_asked_for(
    widths: tuple[int, ...],
) -> None:
    check(Split("ahd", (0, 1, 3), widths, adds_up=True))


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_a_block_that_changes_what_another_has_returned_is_refused(network: str) -> None:
    def change(module: Blocks) -> None:
        blocks: Any = getattr(module, network)
        blocks[1] = nn.Sequential(nn.ReLU(inplace=True), blocks[1])

    with pytest.raises(ConfigurationError, match=rf"block 1 \({network}.1\) changes its input"):
        run_split(Split("dpu", (0, 1, 2), (1, 1), change=change))


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
