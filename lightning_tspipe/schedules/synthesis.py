"""Schedule synthesis: the best of the fixed orders and of those that list scheduling finds.

The fixed orders are the paper's, and GPipe's with the next batch's teacher instead of this one's.
So the result is never slower than either.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.schedules.list_scheduling import Policy, list_schedule, list_step_time
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.schedules.zero_bubble import split_backward
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import StepGraph, graph_seconds, graph_step_time

_MANY_ACTIONS = 4000
_FEW_POLICIES = 2
"""Number of policies for a step with many actions, where each takes a second or more."""


def synthesize(
    pipeline: Pipeline,
    costs: CostTable,
    *,
    teacher_now: bool,
    teacher_next: bool,
    split: frozenset[int] = frozenset(),
) -> Schedule:
    """The order with the smallest simulated step time; never slower than TSPipe's and GPipe's.

    Args:
        pipeline: The pipeline.
        costs: Seconds per action and bytes per message.
        teacher_now: Whether the teacher of this batch runs in this step, since nothing ran ahead.
        teacher_next: Whether the teacher of the next batch runs ahead in this step.
        split: Student stages whose backward runs in two halves.
    """
    costs.check(pipeline)
    paper = tspipe(pipeline, teacher_now=teacher_now, teacher_next=teacher_next)
    fixed = split_backward(paper, split)
    graph = StepGraph.of(fixed)
    # The first and the last step of an epoch don't repeat.
    repeats = pipeline.teacher is None or teacher_now != teacher_next
    score = graph_step_time if repeats else graph_seconds
    found = {fixed.ranks: score(graph, costs)}
    policies = _policies(pipeline, split, ahead=teacher_next)
    if len(graph.actions) > _MANY_ACTIONS:
        policies = islice(policies, _FEW_POLICIES)
    listed = (list_schedule(graph, costs, policy, repeats=repeats) for policy in policies)
    for order in chain([_ahead_last(fixed)], listed):
        if order not in found:
            found[order] = score(StepGraph.of(Schedule(pipeline, order)), costs)
    # Ties go to the order that comes first: the paper's.
    return Schedule(pipeline, min(found, key=lambda order: found[order]))


def estimate_step_time(graph: StepGraph, costs: CostTable, num_policies: int = 1) -> float:
    """Estimate the seconds per step of :func:`synthesize`; much faster than synthesising.

    Args:
        graph: Any order of a step that repeats, with the backwards split as desired.
        costs: Costs of the same pipeline.
        num_policies: Number of policies to try; more are more accurate.
    """
    policies = _policies(graph.schedule.pipeline, graph.schedule.split, ahead=True)
    tried = islice(policies, max(1, num_policies))
    return min(list_step_time(graph, costs, policy) for policy in tried)


def _ahead_last(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The order with everything that runs ahead at the end of the step: GPipe's, rotated."""

    def place(action: Action) -> int:
        if action.op is Op.OPTIMIZER:
            return 2
        return int(action.op is Op.TEACHER and action.batch > 0)

    return tuple(tuple(sorted(actions, key=place)) for actions in schedule.ranks)


def _policies(pipeline: Pipeline, split: frozenset[int], *, ahead: bool) -> Iterator[Policy]:
    """The variants worth trying: only those that can differ for this pipeline."""
    ranks = pipeline.student.ranks
    return (
        Policy(patience, weights_first=weights_first, deep_first=deep_first)
        for patience in (0.5, 0.0, 1.0)
        for weights_first in ((True, False) if split and ahead else (True,))
        for deep_first in ((False, True) if len(set(ranks)) < len(ranks) else (False,))
    )
