"""What the relay benchmark computes by itself."""

from __future__ import annotations

import pytest

from benchmarks.relay import papers
from benchmarks.relay.pricing import _data_parallel, _run, _work
from benchmarks.relay.simulated import chosen_over_best
from lightning_tspipe.planning.relay import plan_mode, seconds_per_batch


def test_data_parallelism_reads_each_batch_once_for_each_block() -> None:
    costs = papers.even_profile()
    shared = plan_mode("dp", costs, papers.NUM_DEVICES)
    alone = seconds_per_batch("dp", shared, costs)
    assert _data_parallel(shared, costs, 0.0) == pytest.approx(alone)
    # Slower loaders than devices: one reading for each block.
    assert _data_parallel(shared, costs, 99.0) == pytest.approx(99 * papers.EVEN_BLOCKS)


def test_equal_blocks_leave_nobody_idle() -> None:
    costs = papers.even_profile()
    plan = plan_mode("dpu", costs, papers.NUM_DEVICES)
    run = _run(costs, plan, 0.0, 0.3)
    assert run["planned_utilization"] == pytest.approx(1.0)
    assert run["partition"] == "2 2 2 2"
    assert _work(plan, costs) == pytest.approx(4 * plan.step_seconds)
    assert chosen_over_best(costs, papers.NUM_DEVICES) == pytest.approx(1.0)


@pytest.mark.parametrize("paper", papers.PAPERS, ids=lambda paper: paper.name)
def test_what_the_emulated_loaders_bring_is_no_less_than_the_papers(paper: papers.Paper) -> None:
    assert papers.EMULATED_RATES[paper.dataset] > papers.SLOWEST_RATES[paper.dataset]
