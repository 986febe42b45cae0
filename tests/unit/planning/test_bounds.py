from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_tspipe.planning.bounds import cycle_seconds
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.workload import Workload
from lightning_tspipe.simulation.cost import CostTable, StageCost
from tests.unit.pipelines import uniform_costs


def test_by_hand(make_pipeline: Any) -> None:
    pipeline = make_pipeline(3, 1, 2)
    costs = replace(
        uniform_costs(pipeline, teacher=7, loss=0.5, optimizer=0.25, latency=0.125),
        student=(
            StageCost(1, 2, 1.5, 1, output_bytes=8),
            StageCost(1, 2, 1.5, 1, output_bytes=16),
            StageCost(3, 4, 2.5, 2),
        ),
        bandwidth=64,
        nodes=(0, 0, 1),
        inter_node_latency=1,
        inter_node_bandwidth=8,
    )
    last = 2 * (3 + 4) + 0.25 + 0.5
    middle = 2 * (1 + 2) + 0.25 + 0.5 + (3 + 4) + 2 * (0.125 + 0.25)
    # Between the first stage, on rank 2, and the second is the link between the nodes.
    first = middle + (1 + 2) + 2 * (1 + 1)
    assert cycle_seconds(pipeline, costs) == (first, middle, last)
    # In halves the gradient comes earlier, and the stage itself takes longer.
    halves = cycle_seconds(pipeline, costs, frozenset({2}))
    assert halves == (first - 1.5, middle - 1.5, last + 1)
    # GPipe's teacher fills nothing.
    plain = cycle_seconds(pipeline, costs, teacher_first=True)
    assert plain == (first + 14, middle + 14, last + 14)


def test_what_the_last_backward_cannot_hide(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 1, teacher=False)
    costs = CostTable.uniform(pipeline)
    plain = cycle_seconds(pipeline, costs)
    summed = cycle_seconds(pipeline, replace(costs, reduction=(0.8, 8.0)))
    assert summed == pytest.approx((plain[0] + 8 - 1.75, plain[1] + 0.1))


def test_a_step_takes_the_larger_of_both() -> None:
    atoms = NetworkProfile((AtomProfile("a", {1: 1.0}, {1: 2.0}),) * 2)
    slow = NetworkProfile((AtomProfile("a", {1: 9.0}),) * 2)
    for teacher, bound in ((atoms, 3 + 3), (slow, 3 + 9)):
        workload = Workload(atoms, teacher, (1, 1), (1,), num_ranks=2)
        assert Layout(workload, (0, 1, 2), 1).bound == bound
