"""Step time of a layout: estimated quickly for the search, simulated exactly for the result."""

from __future__ import annotations

from lightning_tspipe.ir.lowering import lower
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.planning.bounds import step_bound
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.schedules.one_f_one_b import one_f_one_b
from lightning_tspipe.schedules.registry import ASYNCHRONOUS, FIXED, build_schedule, runs_ahead
from lightning_tspipe.schedules.synthesis import estimate_step_time
from lightning_tspipe.schedules.tspipe import tspipe
from lightning_tspipe.schedules.zero_bubble import split_backward
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.graph import StepGraph
from lightning_tspipe.simulation.simulator import graph_step_time, steady_step_time


class Evaluator:
    """Simulates layouts; caches the actions of a step, which depend on few of their properties.

    Args:
        schedule: Name of the schedule.
        ahead: Whether the teacher of the next batch may run early, if the schedule does that.
    """

    def __init__(self, schedule: str, *, ahead: bool = True) -> None:
        self._name = schedule
        self._ahead = runs_ahead(schedule) and ahead
        self._graphs: dict[tuple[Pipeline, frozenset[int]], StepGraph] = {}
        self.num_simulated = 0

    def estimate(self, layout: Layout, effort: int = 1) -> float:
        """Estimated seconds per steady step; from ``effort`` simulations for "tspipe"."""
        graph, costs = self._graph(layout), layout.costs
        if self._name == "tspipe":
            self.num_simulated += effort
            return estimate_step_time(graph, costs, effort)
        self.num_simulated += 1
        return graph_step_time(graph, costs)

    def exact(self, layout: Layout) -> float:
        """Simulated seconds per steady step of the schedule that will run."""
        self.num_simulated += 1
        costs = layout.costs
        return steady_step_time(self._build(layout.pipeline, costs, layout.split), costs)

    def _build(self, pipeline: Pipeline, costs: CostTable, split: frozenset[int]) -> Schedule:
        return build_schedule(
            self._name,
            pipeline,
            costs,
            teacher_now=not self._ahead,
            teacher_next=self._ahead,
            split=split,
        )

    def bound(self, layout: Layout) -> float:
        """A lower bound of the seconds per step of this schedule, without a simulation."""
        if self._name == "sequential":
            return sum(layout.busy)  # about: one rank works at a time, except in optimizer steps
        return step_bound(layout, teacher_first=self._name == "gpipe")

    def num_actions(self, layout: Layout) -> int:
        """Number of actions in a step."""
        return len(self._graph(layout).actions)

    def _graph(self, layout: Layout) -> StepGraph:
        key = (layout.pipeline, layout.split)
        if key not in self._graphs:
            schedule = split_backward(self._fixed(key[0]), layout.split)
            self._graphs[key] = StepGraph.of(lower(schedule))
        return self._graphs[key]

    def _fixed(self, pipeline: Pipeline) -> Schedule:
        if self._name in FIXED:
            return FIXED[self._name](pipeline)
        if self._name == ASYNCHRONOUS:
            return one_f_one_b(pipeline, fresh=False, ahead=pipeline.num_ranks)
        return tspipe(pipeline, teacher_now=not self._ahead, teacher_next=self._ahead)
