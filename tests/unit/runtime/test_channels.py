"""Every kind of message has a channel of its own, and no rank many communicators."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import pytest

from lightning_tspipe.ir.pipeline import Coupling, NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Message
from lightning_tspipe.planning.placement import default_ranks
from lightning_tspipe.planning.relay import Pass, Work
from lightning_tspipe.runtime.modes.relay.engine import edges_of, pipeline_of
from lightning_tspipe.runtime.transport.channels import (
    Edge,
    Lane,
    channel_of,
    connected,
    edges_along,
    edges_from,
    program_edges,
)
from lightning_tspipe.schedules.fanout import fanout
from lightning_tspipe.schedules.one_f_one_b import one_f_one_b
from lightning_tspipe.schedules.registry import build_step
from lightning_tspipe.schedules.relay import relay
from lightning_tspipe.simulation.cost import CostTable


def network(*ranks: int, pieces: int = 2) -> NetworkLayout:
    return NetworkLayout(ranks, 2, pieces, frozenset({len(ranks) - 1}))


def messages(kind: str) -> tuple[Message, ...]:
    if kind == "fanout":
        heads = NetworkLayout((0, 1), 1, 1, frozenset({0, 1}))
        pipeline = Pipeline(3, heads, network(2, 1, 0), 2, coupling=Coupling.FANOUT)
        return fanout(pipeline, before=2, following=2, depth=2).messages
    if kind == "1f1b":
        pipeline = Pipeline(3, network(2, 1, 0, pieces=1), None, 2)
        return one_f_one_b(pipeline, fresh=True, ahead=2).messages
    pipeline = Pipeline(3, network(2, 1, 0), network(2, 0), 2)
    costs = CostTable.uniform(pipeline)
    return build_step("tspipe", pipeline, costs, fresh=True, ahead=1).messages


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
    edges = program_edges(step)
    for lane in (Lane.FIELDS, Lane.EARLY_FIELDS):
        edges |= edges_from(pipeline.data_rank, pipeline.loss_ranks, lane)
    edges |= edges_along(num_ranks)  # links are measured over them, and norms added up
    of_rank = communicators(edges, num_ranks)
    assert max(of_rank) <= 6
    assert min(of_rank) >= 2
    assert connected(edges) == edges


def communicators(edges: Iterable[Edge], num_ranks: int) -> list[int]:
    return [sum(rank in edge[:2] for edge in edges) for rank in range(num_ranks)]


def edges_of_heads(num_ranks: int) -> set[Edge]:
    """One rank has the trunk, and each other one a head that reads labels."""
    heads = NetworkLayout(tuple(range(1, num_ranks)), 1, 1, frozenset(range(num_ranks - 1)))
    trunk = NetworkLayout((0,), 1, 1, frozenset({0}))
    pipeline = Pipeline(num_ranks, heads, trunk, 0, coupling=Coupling.FANOUT)
    edges = program_edges(fanout(pipeline, before=1, following=1, depth=1))
    return edges | edges_from(0, pipeline.loss_ranks, Lane.EARLY_FIELDS)


def edges_of_relay(*widths: int, is_relayed: bool = True) -> set[Edge]:
    """Stages of so many ranks each, whose losses all read the batch."""
    starts = accumulate(widths, initial=0)
    groups = [tuple(range(start, start + n)) for start, n in zip(starts, widths, strict=False)]
    stages = tuple(Work(block, (block,), group) for block, group in enumerate(groups))
    program = relay(pipeline_of(Pass(stages, is_relayed)))
    return edges_of(program, stages)


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("kind", ["heads", "relay", "wide", "all share", "pairs", "not relayed"])
def test_no_rank_has_more_than_eight_communicators(kind: str, num_ranks: int) -> None:
    edges = {
        "heads": lambda: edges_of_heads(num_ranks),
        "relay": lambda: edges_of_relay(*[1] * num_ranks),
        "wide": lambda: edges_of_relay(1, num_ranks - 2, 1),
        "all share": lambda: edges_of_relay(num_ranks),
        "pairs": lambda: edges_of_relay(*[2] * (num_ranks // 2)),
        "not relayed": lambda: edges_of_relay(*[1] * num_ranks, is_relayed=False),
    }[kind]()
    before = edges_along(num_ranks)  # measured at the start
    found = connected(edges - before, before)
    of_rank = communicators(before | found, num_ranks)
    assert max(of_rank) <= 8
    assert found <= edges
    far = edges - before - found
    busy = {rank for rank, number in enumerate(of_rank) if number == 8}
    assert all(busy.intersection(edge[:2]) for edge in far)  # none without need
    assert all(edge.lane != Lane.PROGRAM or kind == "heads" for edge in far)


def test_activations_are_connected_before_fields() -> None:
    edges = edges_from(0, range(1, 10), Lane.FIELDS) | edges_from(0, range(4, 11), Lane.RELAY)
    found = connected(edges)
    assert {e for e in found if e.lane is Lane.RELAY} == edges_from(0, range(4, 11), Lane.RELAY)
    assert found - edges_from(0, range(4, 11), Lane.RELAY) == {Edge(0, 1, Lane.FIELDS)}
