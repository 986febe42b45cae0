from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tspipe.planning.partition import Chain

COSTS = st.lists(st.integers(0, 9).map(float), min_size=3, max_size=9)


def busiest(cuts: tuple[int, ...], costs: list[float], speeds: list[float]) -> float:
    busy = [0.0] * len(speeds)
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        busy[stage % len(speeds)] += sum(costs[start:stop]) / speeds[stage % len(speeds)]
    return max(busy)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_evenest_of_all_ways_to_fold(data: st.DataObject) -> None:
    costs = data.draw(COSTS)
    speeds = data.draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=2, max_size=3))
    joined = data.draw(st.frozensets(st.integers(0, len(costs) - 2), max_size=2))
    places = [n for n in range(1, len(costs)) if n - 1 not in joined]
    most = data.draw(st.integers(len(speeds) + 1, 2 * len(speeds)))
    folded = [
        (0, *inner, len(costs))
        for count in range(len(speeds) + 1, most + 1)
        for inner in combinations(places, count - 1)
    ]
    best = min((busiest(cuts, costs, speeds) for cuts in folded), default=float("inf"))
    chain = Chain(costs, most, speeds=speeds, joined=joined)
    found = chain.fold(1000.0)
    if not folded:
        assert found is None
        return
    assert found in folded
    # It stops where nothing much evener is possible.
    assert busiest(found, costs, speeds) <= max(best, 1.005 * sum(costs) / sum(speeds)) + 1e-9
    # Nothing that only reaches the limit is of use.
    assert chain.fold(best) is None
