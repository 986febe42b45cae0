from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.heads import HeadCost, Task
from lightning_tspipe.planning.partition import Chain


def trunk(*seconds: float, size: int = 0) -> Chain:
    number = len(seconds)
    names = tuple(f"atom{index}" for index in range(number))
    return Chain(seconds, memory=(size,) * number, transfers=(0.0,) * number, names=names)


def heads(*seconds: float, size: int = 0) -> list[HeadCost]:
    return [HeadCost(f"head{index}", each, size) for index, each in enumerate(seconds)]


def test_the_papers_units_are_balanced() -> None:
    found = Task(trunk(*[1.0] * 3), heads(2, 2, 2), 3).best()
    assert sorted(found.head_ranks) == [0, 1, 2]
    assert found.busy == (3.0, 3.0, 3.0)


def test_a_large_head_gets_less_of_the_trunk() -> None:
    found = Task(trunk(*[1.0] * 6), heads(4, 1, 1, size=10), 2).best()
    assert max(found.busy) == 6.0
    assert "ms per step" in found.describe(heads(4, 1, 1))


def test_a_head_that_is_larger_than_all_else_is_alone() -> None:
    found = Task(trunk(1, 1), heads(9, 1), 2).best()
    assert found.busy == (9.0, 3.0)
    assert found.ranks == (1,)  # the other one has the whole trunk


def test_who_reads_the_data_gets_less_of_the_trunk() -> None:
    found = Task(trunk(*[1.0] * 6), heads(2, 2), 2, beside=(0.0, 2.0)).best()
    assert found.busy == (6.0, 6.0)
    assert (found.cuts, found.head_ranks) == ((0, 4, 6), (0, 0))
    assert sum(Task(trunk(2.0), heads(1, 1), 2, beside=(0.0, 5.0)).best().head_ranks) == 0


def test_memory_decides_where_time_would_not() -> None:
    with pytest.raises(PartitionError, match="head 'head0' alone needs"):
        Task(trunk(1, 1), heads(1, 1, size=100), 2, memory_limit=50).best()
    found = Task(trunk(1, 1, size=1), heads(1, 1, size=100), 2, memory_limit=150).best()
    assert sorted(found.head_ranks) == [0, 1]
    with pytest.raises(PartitionError, match="of heads on one rank"):
        Task(trunk(1, 1, size=60), heads(1, 1, size=100), 2, memory_limit=150).best()


@settings(max_examples=60, deadline=None)
@given(
    atoms=st.lists(st.floats(0.1, 3), min_size=1, max_size=8),
    costs=st.lists(st.floats(0.1, 5), min_size=1, max_size=14),
    num_ranks=st.integers(1, 4),
)
def test_everything_is_somewhere_and_nobody_is_much_busier(
    atoms: list[float], costs: list[float], num_ranks: int
) -> None:
    found = Task(trunk(*atoms), heads(*costs), num_ranks).best()
    assert found.cuts[0] == 0
    assert found.cuts[-1] == len(atoms)
    assert all(start < stop for start, stop in pairwise(found.cuts))
    assert len(found.head_ranks) == len(costs)
    assert sum(found.busy) == pytest.approx(sum(atoms) + sum(costs))
    # No worse than twice what can't be avoided.
    least = max(sum(found.busy) / num_ranks, *atoms, *costs)
    assert max(found.busy) <= 2 * least + 1e-9
