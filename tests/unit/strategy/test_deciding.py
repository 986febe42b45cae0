"""Sizes are measured as far as the plan depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.strategy.training.deciding import measured_until_planned


@pytest.mark.parametrize(
    ("first", "plans", "measured"),
    [
        ([4, 8], [8], [[4, 8]]),
        ([4, 8], [4, 4], [[4, 8], [2, 4, 8]]),
        ([4, 8], [1, 1], [[4, 8], [1, 4, 8]]),
        ([4, 8], [2, 8], [[4, 8], [1, 2, 4, 8]]),
        ([4, 8], [2, 4, 4], [[4, 8], [1, 2, 4, 8]]),
        ([4, 8], [1, 2, 2], [[4, 8], [1, 4, 8], [1, 2, 4, 8]]),
        ([4, 8], [16], [[4, 8]]),
        ([1, 2, 4, 8], [1], [[1, 2, 4, 8]]),
    ],
)
def test_until_a_plan_stands(
    first: Sequence[int], plans: list[int], measured: list[list[int]]
) -> None:
    asked: list[list[int]] = []

    def profiled(counts: Sequence[int]) -> Any:
        asked.append(list(counts))
        return len(asked)

    def planned(profile: Any) -> Any:
        placement = SimpleNamespace(num_microbatches=plans[profile - 1])
        return profile, SimpleNamespace(placement=placement)

    found: Any = measured_until_planned((1, 2, 4, 8), first, profiled, planned)
    assert asked == measured
    profile, plan = found
    assert profile == len(asked)
    assert plan.placement.num_microbatches == plans[-1]


def test_all_sizes_are_tried_where_the_network_needs_many_samples() -> None:
    asked: list[list[int]] = []

    def profiled(counts: Sequence[int]) -> Any:
        asked.append(list(counts))
        if 1 not in counts:
            raise PartitionError("the network cannot run 2 samples or fewer")
        return None

    def planned(profile: Any) -> Any:
        return profile, SimpleNamespace(placement=SimpleNamespace(num_microbatches=1))

    measured_until_planned((1, 2, 4), [2, 4], profiled, planned)
    assert asked == [[2, 4], [1, 2, 4]]
    with pytest.raises(PartitionError):
        measured_until_planned((2, 4), [2, 4], profiled, planned)
