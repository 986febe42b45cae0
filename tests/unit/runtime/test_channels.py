"""Every kind of message has a channel of its own."""

from __future__ import annotations

import pytest

from lightning_tspipe.ir.lowering import Message, lower
from lightning_tspipe.ir.pipeline import Coupling, NetworkLayout, Pipeline
from lightning_tspipe.planning.placement import default_ranks
from lightning_tspipe.runtime.transport.channels import (
    Lane,
    channel_of,
    edges_along,
    edges_from,
    program_edges,
)
from lightning_tspipe.schedules.fanout import fanout
from lightning_tspipe.schedules.one_f_one_b import one_f_one_b
from lightning_tspipe.schedules.registry import build_schedule, build_step
from lightning_tspipe.simulation.cost import CostTable


def network(*ranks: int, pieces: int = 2) -> NetworkLayout:
    return NetworkLayout(ranks, 2, pieces, frozenset({len(ranks) - 1}))


def messages(kind: str) -> tuple[Message, ...]:
    if kind == "fanout":
        heads = NetworkLayout((0, 1), 1, 1, frozenset({0, 1}))
        pipeline = Pipeline(3, heads, network(2, 1, 0), 2, coupling=Coupling.FANOUT)
        return lower(fanout(pipeline, before=2, following=2, depth=2)).messages
    if kind == "1f1b":
        pipeline = Pipeline(3, network(2, 1, 0, pieces=1), None, 2)
        return lower(one_f_one_b(pipeline, fresh=True, ahead=2)).messages
    pipeline = Pipeline(3, network(2, 1, 0), network(2, 0), 2)
    costs = CostTable.uniform(pipeline)
    return lower(
        build_schedule("tspipe", pipeline, costs, teacher_now=True, teacher_next=True)
    ).messages


@pytest.mark.parametrize("kind", ["fanout", "1f1b", "tspipe"])
def test_what_is_in_order_by_itself_has_a_channel_by_itself(kind: str) -> None:
    sent = [message for message in messages(kind) if message.payload != "batch"]
    orders = {message.channel[2:]: channel_of(message) for message in sent}
    assert len(set(orders.values())) == len(orders) > 1
    for message in sent:
        assert channel_of(message) == orders[message.channel[2:]]


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("gpipe", 1), ("gpipe", 2), ("1f1b", 1)])
def test_a_rank_has_as_many_communicators_as_neighbours(
    num_ranks: int, schedule: str, stages_per_rank: int
) -> None:
    stages = num_ranks * stages_per_rank
    ranks = default_ranks(stages, num_ranks)
    student = network(*ranks, pieces=1 if schedule == "1f1b" else 2)
    teacher = None if schedule == "1f1b" else network(*ranks)
    pipeline = Pipeline(num_ranks, student, teacher, num_ranks - 1)
    costs = CostTable.uniform(pipeline)
    ahead = num_ranks if schedule == "1f1b" else 0
    step = build_step(schedule, pipeline, costs, fresh=True, ahead=ahead)
    edges = program_edges(lower(step))
    for lane in (Lane.FIELDS, Lane.EARLY_FIELDS):
        edges |= edges_from(pipeline.data_rank, pipeline.loss_ranks, lane)
    edges |= edges_along(num_ranks)  # links are measured over them, and norms added up
    of_rank = [sum(rank in edge[:2] for edge in edges) for rank in range(num_ranks)]
    assert max(of_rank) <= 8
    assert min(of_rank) >= 2
