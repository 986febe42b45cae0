"""Pipelines and costs by their few numbers, for tests of schedules, simulation and validation."""

from __future__ import annotations

from dataclasses import replace

from lightning_tspipe.ir.pipeline import Coupling, NetworkLayout, Pipeline
from lightning_tspipe.planning.placement import default_ranks
from lightning_tspipe.simulation.cost import CostTable, StageCost


def make_pipeline(  # noqa: PLR0913 -- as many as a pipeline has
    num_ranks: int,
    num_calls: int,
    num_microbatches: int,
    *,
    num_stages: int | None = None,
    teacher: bool = True,
    teacher_ranks: tuple[int, ...] | None = None,
    outputs: frozenset[int] = frozenset(),
) -> Pipeline:
    """Stage s on rank (S - 1 - s) % P, for the teacher too unless its ranks are given."""
    ranks = default_ranks(num_stages or num_ranks, num_ranks)

    def network(held: tuple[int, ...]) -> NetworkLayout:
        taps = frozenset(stage for stage in outputs if stage < len(held))
        return NetworkLayout(held, num_calls, num_microbatches, taps | {len(held) - 1})

    return Pipeline(
        num_ranks,
        network(ranks),
        network(teacher_ranks or ranks) if teacher else None,
        data_rank=ranks[0],
    )


def fanout_pipeline(heads: tuple[int, ...], num_ranks: int) -> Pipeline:
    """A trunk with a stage on each rank, the first on the last, and heads on the given ranks."""
    ranks = default_ranks(num_ranks, num_ranks)
    trunk = NetworkLayout(ranks, 1, 1, frozenset({num_ranks - 1}))
    student = NetworkLayout(heads, 1, 1, frozenset(range(len(heads))))
    return Pipeline(num_ranks, student, trunk, ranks[0], coupling=Coupling.FANOUT)


def asynchronous_pipeline(num_ranks: int, *, num_calls: int = 1, num_teachers: int = 0) -> Pipeline:
    """A whole batch per unit; the teacher's stages, if any, on the ranks of the student's first."""
    ranks = tuple(reversed(range(num_ranks)))
    teacher_ranks = ranks[:num_teachers] or None
    return make_pipeline(
        num_ranks, num_calls, 1, teacher=bool(num_teachers), teacher_ranks=teacher_ranks
    )


def uniform_costs(  # noqa: PLR0913 -- one number per kind of action
    pipeline: Pipeline,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    teacher: float = 1.0,
    loss: float = 0.0,
    optimizer: float = 0.0,
    latency: float = 0.0,
) -> CostTable:
    """The same cost for every stage, equal halves of the backward, free links."""
    costs, student = CostTable.uniform(pipeline), StageCost(forward, backward, *[backward / 2] * 2)
    return replace(
        costs,
        student=(student,) * len(costs.student),
        teacher=(StageCost(teacher),) * len(costs.teacher),
        loss=loss,
        optimizer=(optimizer,) * pipeline.num_ranks,
        latency=latency,
    )
