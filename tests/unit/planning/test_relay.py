"""Automatic hybrid distribution: exact, within memory, and clear where there is none."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.relay.simulated import distributions
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.relay import (
    MODES,
    BlockProfile,
    Mode,
    RelayPlan,
    RelayProfile,
    distribute,
    plan_mode,
)


def block(
    name: str = "b", per_sample: float = 1.0, fixed: float = 0.0, batch_size: int = 12, **rest: int
) -> BlockProfile:
    """A third of the time is the teacher's."""
    sizes = range(1, batch_size + 1)
    times = {size: fixed + per_sample * size for size in sizes}
    return BlockProfile(
        name, {n: t / 3 for n, t in times.items()}, {n: 2 * t / 3 for n, t in times.items()}, **rest
    )


def profile(seed: int, num_blocks: int, batch_size: int = 12) -> RelayProfile:
    draw = random.Random(seed)  # noqa: S311 - no secrets
    blocks = tuple(
        block(
            f"b{index}",
            draw.uniform(0.1, 3),
            draw.uniform(0, 4),
            batch_size,
            input_bytes=draw.randrange(1, 200),
            gradient_bytes=draw.randrange(1, 800),
            state_bytes=draw.randrange(1, 500),
            activation_bytes=draw.randrange(1, 50),
        )
        for index in range(num_blocks)
    )
    return RelayProfile(blocks, batch_size, latency=0.01, bandwidth=500.0)


@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 4), st.booleans())
def test_best_of_all_distributions(
    seed: int, num_blocks: int, num_devices: int, bounded: bool
) -> None:
    blocks = profile(seed, num_blocks)
    plans = [blocks.priced(p) for p in distributions(num_blocks, num_devices)]
    limit = None
    if bounded:
        needs = sorted(max(plan.stage_bytes) for plan in plans)
        limit = needs[len(needs) // 2]
        plans = [plan for plan in plans if max(plan.stage_bytes) <= limit]
    found = distribute(blocks, num_devices, memory_limit=limit)
    assert found.step_seconds == pytest.approx(min(plan.step_seconds for plan in plans))
    assert found.num_devices == num_devices
    assert all(a < b for a, b in pairwise(found.cuts))
    assert found.cuts[-1] == num_blocks


def test_number_of_distributions() -> None:
    # Compositions of both, of equally many parts: 6 blocks on 4 devices.
    assert sum(1 for _ in distributions(6, 4)) == 1 + 5 * 3 + 10 * 3 + 10


def test_one_long_block_is_shared() -> None:
    blocks = RelayProfile((block("long", 3.0), block("short", fixed=12.0, per_sample=0.001)), 12)
    plan = distribute(blocks, 4)
    assert (plan.cuts, plan.widths) == ((0, 1, 2), (3, 1))
    assert plan.ranks == ((3, 2, 1), (0,))
    assert "long" in str(plan)
    assert "devices busy 100%" in str(plan)  # all of them 12 s


def test_what_does_not_get_faster_is_not_shared() -> None:
    blocks = RelayProfile((block(fixed=9.0, per_sample=0.01), block(fixed=9.0)), 12)
    assert distribute(blocks, 2).widths == (1, 1)


def test_no_device_holds_more_than_it_may() -> None:
    blocks = RelayProfile(tuple(block(state_bytes=size) for size in (40, 40, 40)), 12)
    assert distribute(blocks, 2, memory_limit=80).widths == (1, 1)
    with pytest.raises(PartitionError, match="no distribution of 3 blocks over 2 devices"):
        distribute(blocks, 2, memory_limit=79)


def test_refusals_name_the_block() -> None:
    blocks = RelayProfile((block("stem", state_bytes=10), block("head", state_bytes=90)), 12)
    with pytest.raises(PartitionError, match=r"block 1 \(head\) fits no device: it needs 0.0 MB"):
        distribute(blocks, 2, memory_limit=50)
    with pytest.raises(
        PartitionError, match="2 blocks for 3 devices, of which at most 1 may share"
    ):
        distribute(blocks, 3, max_width=1)
    with pytest.raises(PartitionError, match="was not measured with 12 samples"):
        distribute(RelayProfile((BlockProfile("x", {1: 1.0}, {1: 1.0}),), 12), 1)


def test_plans_of_nothing_measured_print() -> None:
    assert "stage" in str(RelayPlan((0, 1, 3), (1, 2), names=("a", "b", "c")))


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_goes_beyond_the_memory(mode: Mode) -> None:
    blocks = RelayProfile(tuple(block(f"b{i}", state_bytes=10) for i in range(4)), 12)
    plan = plan_mode(mode, blocks, 2, 100)
    assert max(plan.stage_bytes) <= 100
    with pytest.raises(PartitionError, match="MB"):
        plan_mode(mode, blocks, 2, 9)


def test_of_the_students_one_keeps_its_activations_at_a_time() -> None:
    blocks = RelayProfile(
        (block(activation_bytes=7, input_bytes=1), block(activation_bytes=5, input_bytes=2)), 12
    )
    assert blocks.stage_bytes(0, 2, 1) == 12 * (7 + 3)
    assert blocks.stage_bytes(0, 2, 4) == 3 * (7 + 3)
