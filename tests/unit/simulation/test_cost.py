from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.simulation.cost import CostTable, StageCost
from lightning_tspipe.simulation.simulator import simulate

COSTS = CostTable(
    student=(StageCost(1, 2, 3, 4, 50, 60), StageCost(5, 6, 7, 8, 90, 100)),
    teacher=(StageCost(9, output_bytes=110), StageCost(10, result_bytes=120)),
    loss=11,
    optimizer=(12, 13),
    effects=(14, 15),
    latency=1,
    bandwidth=10,
    data=16,
    batch_bytes=170,
)


def test_seconds_of_each_action() -> None:
    expected = {
        "0F0": 1, "0B3": 2, "0I0": 3, "0W0": 4, "1F0": 5, "1B0": 6, "1I0": 7, "1W0": 8,
        "0T0+1": 9, "1T0": 10, "0L": 11, "0O": 12, "1O": 13, "0E": 14, "1E": 15, "1D": 16,
    }  # fmt: skip
    assert {text: COSTS.seconds(Action.parse(text)) for text in expected} == expected


def test_bytes_of_each_message(make_pipeline: Any) -> None:
    # The last stages sit on rank 1, so that outputs and gradients cross to the loss on rank 0.
    pipeline = make_pipeline(2, 1, 1, outputs=frozenset({0}))
    swapped = replace(
        pipeline,
        student=replace(pipeline.student, ranks=(0, 1)),
        teacher=replace(pipeline.teacher, ranks=(0, 1)),
    )
    program = gpipe(swapped)
    sizes = {str(m): COSTS.message_bytes(m) for m in program.messages}
    assert sizes == {
        "1D>0F0@0": 0,
        "1D>0T0@0": 0,
        "1D>0L@0": 170,
        "0T0>1T0@1": 110,
        "1T0>0L@0": 120,
        "0F0>1F0@1": 50,
        "1F0>0L@0": 100,
        "0L>1B0@1": 100,
        "1B0>0B0@0": 50,
    }


def test_messages_between_nodes_take_their_own_link(make_pipeline: Any) -> None:
    pipeline = make_pipeline(3, 1, 1, teacher=False)
    costs = replace(
        CostTable.uniform(pipeline),
        student=(StageCost(1, output_bytes=100),) * 3,
        latency=1,
        bandwidth=100,
        nodes=(0, 0, 1),
        inter_node_latency=5,
        inter_node_bandwidth=10,
    )
    starts = {span.action: span.start for span in simulate([gpipe(pipeline)], costs).spans}
    assert (starts["1F0"], starts["2F0"]) == (1 + 15, 17 + 2)


def test_refuses_a_table_for_another_pipeline(make_pipeline: Any) -> None:
    COSTS.check(make_pipeline(2, 1, 1))
    with pytest.raises(ScheduleError, match="2 student stages; the pipeline has 3"):
        COSTS.check(make_pipeline(3, 1, 1))
    with pytest.raises(ScheduleError, match="2 teacher stages; the pipeline has 0"):
        COSTS.check(make_pipeline(2, 1, 1, teacher=False))
    for field in ("nodes", "reduction"):
        with pytest.raises(ScheduleError, match=r"costs for 3 .*; the pipeline has 2"):
            replace(COSTS, **{field: (0, 0, 0)}).check(make_pipeline(2, 1, 1))
