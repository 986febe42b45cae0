from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.partition import Chain


def slowest(
    cuts: Sequence[int],
    costs: Sequence[float],
    loads: Sequence[float],
    transfers: Sequence[float],
    speeds: Sequence[float],
) -> float:
    times = []
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        compute = loads[stage] + sum(costs[start:stop]) / speeds[stage]
        sends = stage < len(cuts) - 2 and stop > start
        times.append(max(compute, transfers[stop - 1] if sends else 0))
    return max(times)


def all_cuts(num_atoms: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations_with_replacement(range(num_atoms + 1), num_stages - 1):
        yield (0, *inner, num_atoms)


@given(data=st.data())
def test_is_the_best_of_all_that_fit(data: st.DataObject) -> None:
    num_atoms, num_stages = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))

    def numbers(count: int, most: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

    costs, transfers, memory = (numbers(num_atoms, most) for most in (9, 12, 9))
    loads, limits = numbers(num_stages, 9), numbers(num_stages, 30)
    # Powers of two: times are exact.
    rates = st.sampled_from([0.25, 0.5, 1.0, 4.0])
    speeds = data.draw(st.lists(rates, min_size=num_stages, max_size=num_stages))
    refused = data.draw(st.frozensets(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=3))

    def fits(start: int, end: int, stage: int) -> bool:
        return (start, stage) not in refused or start == end

    joined = data.draw(st.frozensets(st.integers(0, max(0, num_atoms - 2)), max_size=2))
    joined = joined - {num_atoms - 1}
    allow_empty = data.draw(st.booleans())
    possible = [
        cuts
        for cuts in all_cuts(num_atoms, num_stages)
        if all(
            (stop > start or allow_empty)
            and sum(memory[start:stop]) <= limits[stage]
            and fits(start, stop, stage)
            for stage, (start, stop) in enumerate(pairwise(cuts))
        )
        and not any(cut - 1 in joined for cut in cuts)
    ]

    def solve() -> tuple[int, ...]:
        return Chain(
            costs,
            num_stages,
            memory=memory,
            memory_limits=limits,
            transfers=transfers,
            loads=loads,
            speeds=speeds,
            fits=fits,
            joined=joined,
            allow_empty=allow_empty,
        ).cut()

    if not possible:
        with pytest.raises(PartitionError):
            solve()
        return
    best = min(slowest(cuts, costs, loads, transfers, speeds) for cuts in possible)
    found = solve()
    assert found in possible
    assert slowest(found, costs, loads, transfers, speeds) == best


def test_of_equally_fast_cuts_the_even_one() -> None:
    assert Chain([6, 1, 1, 1, 1], 3).cut() == (0, 1, 3, 5)


def test_a_fast_device_gets_more() -> None:
    assert Chain([1] * 8, 3, speeds=[1, 2, 1]).cut() == (0, 2, 6, 8)
    # Memory comes first: the fast device holds one atom only.
    limits: dict[str, Any] = {"memory": [1] * 8, "memory_limits": [8, 1, 8]}
    assert Chain([1] * 8, 3, speeds=[1, 2, 1], **limits).cut() == (0, 3, 4, 8)


def test_what_else_does_not_fit() -> None:
    with pytest.raises(PartitionError, match="no cut into 2 stages fits"):
        Chain([1, 1], 2, fits=lambda start, end, stage: stage == 0).cut()


def test_too_few_atoms() -> None:
    with pytest.raises(PartitionError, match=r"2 pieces at most, but 3 stages.*devices=2 or fewer"):
        Chain([1, 1], 3).cut()
    with pytest.raises(PartitionError, match="1 piece at most, but 2 stages"):
        Chain([1, 1], 2, joined={0}).cut()


def test_names_the_atom_that_fits_nowhere() -> None:
    with pytest.raises(PartitionError, match=r"atom 'fc' alone needs 3\.0 MB.*may hold 2\.0 MB"):
        Chain(
            [1, 1],
            2,
            memory=[1_000_000, 3_000_000],
            memory_limits=[2_000_000, 2_000_000],
            names=["conv", "fc"],
        ).cut()


def test_names_the_total_that_does_not_fit() -> None:
    message = r"needs 4\.5 MB, atom '2' alone 2\.0 MB; the stages may hold 2\.0 MB, 2\.0 MB"
    with pytest.raises(PartitionError, match=message):
        Chain(
            [1, 1, 1],
            2,
            memory=[1_000_000, 1_500_000, 2_000_000],
            memory_limits=[2_000_000, 2_000_000],
        ).cut()
