"""Lower bounds of the step time, from the work of each rank and the fill condition.

The teacher can fill the time that a stage waits, as far as it takes that long (TSPipe, section
3.2): between its last forward and its first backward, stage s waits for the later stages and for
the loss, there and back. Until its optimizer step it cannot work on the student for another batch.
So a step takes at least, for every stage s::

    forwards of s | F(s + 1) ... F(last), loss, B(last) ... B(s + 1) | backwards of s | optimizer
                  |<------ to be filled with the teacher ----------->|

and at least as long as the busiest rank works. If the second bound is larger, the fill condition
holds; a pipeline without bubbles is then possible if whole teacher units fill the time, and if a
teacher that is slower than the student reaches the next stage early enough.
"""

from __future__ import annotations

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.zero_bubble import split_backward
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import exposed_reduction


def busy_seconds(
    pipeline: Pipeline,
    costs: CostTable,
    split: frozenset[int] = frozenset(),
    per_update: int = 1,
) -> tuple[float, ...]:
    """Seconds that each rank works in a step; the largest is a lower bound for any schedule.

    Args:
        pipeline: The pipeline.
        costs: Costs of the pipeline.
        split: Student stages whose backward runs in two halves.
        per_update: Steps that share an update, and effects.
    """
    order = split_backward(gpipe(pipeline), split)
    rare = {Op.OPTIMIZER, Op.EFFECTS}

    def share(action: Action) -> float:
        return costs.seconds(action) / (per_update if action.op in rare else 1)

    return tuple(sum(map(share, actions)) for actions in order.ranks)


def cycle_seconds(
    pipeline: Pipeline,
    costs: CostTable,
    split: frozenset[int] = frozenset(),
    *,
    teacher_first: bool = False,
) -> tuple[float, ...]:
    """For each student stage, seconds from its first forward of a batch to that of the next.

    Args:
        pipeline: The pipeline.
        costs: Costs of the pipeline.
        split: Student stages whose backward runs in two halves.
        teacher_first: Whether every rank runs the teacher before the student, as in GPipe's order,
            so that it fills no bubble.
    """
    num_units, ranks = pipeline.student.num_units, pipeline.student.ranks
    teacher = [0.0] * pipeline.num_ranks
    if teacher_first and pipeline.teacher is not None:
        for rank, cost in zip(pipeline.teacher.ranks, costs.teacher, strict=True):
            teacher[rank] += pipeline.teacher.num_units * cost.forward
    # From the last stage back: the round trip of a unit from each stage to the loss grows.
    round_trip = costs.loss
    found = []
    for stage in reversed(range(len(ranks))):
        cost, rank = costs.student[stage], ranks[stage]
        halves = cost.input_backward, cost.weight_backward
        backward = halves if stage in split else (cost.backward,)
        own = num_units * (cost.forward + sum(backward))
        own = own + costs.optimizer[rank] + costs.effects[rank] + teacher[rank]
        if costs.reduction:
            own += exposed_reduction(costs.reduction[rank], backward[-1])
        found.append(own + round_trip)
        round_trip += cost.forward + backward[0]
        source = ranks[stage - 1]
        if stage and source != rank:
            latency, bandwidth = costs.link(source, rank)
            round_trip += 2 * (latency + costs.student[stage - 1].output_bytes / bandwidth)
    return tuple(reversed(found))
