"""Simulation of a schedule: every rank in order, transfers beside the computation.

A rank starts its next action as soon as the one before has ended and everything that it waits for
is available. A message leaves when its producer ends, queues for its link, and takes ``bytes /
bandwidth + latency``. There is no barrier between steps: a rank begins step n + 1 right after its
own optimizer step n.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.lowering import Program, lower
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.graph import StepGraph
from lightning_tspipe.simulation.ledger import UNKNOWN, Ledger
from lightning_tspipe.simulation.timeline import Span, Timeline

STEADY_STEPS = 6
"""Steps after which a pipeline is in its steady state."""


def simulate(steps: Sequence[Program], costs: CostTable) -> Timeline:
    """Simulate consecutive steps.

    Args:
        steps: For example warm-up, steady, steady, last.
        costs: Costs of the pipeline of these programs.

    Raises:
        ScheduleError: The schedule deadlocks; names the blocked actions.
    """
    if not steps:
        return Timeline((), 0)
    costs.check(steps[0].schedule.pipeline)
    distinct = {id(program): StepGraph.of(program) for program in steps}
    walk = _Walk([distinct[id(program)] for program in steps], costs)
    walk.run()
    return walk.timeline()


def steady_step_time(schedule: Schedule, costs: CostTable) -> float:
    """Seconds per step when ``schedule`` repeats, after the first steps.

    Raises:
        ScheduleError: The schedule deadlocks.
    """
    return graph_step_time(StepGraph.of(lower(schedule)), costs)


def graph_step_time(graph: StepGraph, costs: CostTable) -> float:
    """As :func:`steady_step_time`, for a step that is numbered already."""
    walk = _Walk([graph] * STEADY_STEPS, costs)
    walk.run()
    # The first half of the steps is a warm-up.
    half = STEADY_STEPS // 2
    return (walk.step_ends[-1] - walk.step_ends[-1 - half]) / half


def graph_seconds(graph: StepGraph, costs: CostTable) -> float:
    """Seconds of one step that starts with every rank idle."""
    walk = _Walk([graph], costs)
    walk.run()
    return walk.step_ends[-1]


class _Walk:
    """Walks all ranks; ``step_ends`` is when each step's last rank is done."""

    def __init__(self, graphs: Sequence[StepGraph], costs: CostTable) -> None:
        self._graphs = graphs
        self._ledger = Ledger(graphs, costs)
        self._num_ranks = len(graphs[0].ranks)
        self._place = [(0, 0)] * self._num_ranks
        self.step_ends = [0.0] * len(graphs)

    def run(self) -> None:
        """Walk until every rank is done.

        Raises:
            ScheduleError: No rank can move.
        """
        waiting = list(range(self._num_ranks))
        while waiting:
            moved = [rank for rank in waiting if self._walk(rank)]
            waiting = [rank for rank in waiting if self._place[rank][0] < len(self._graphs)]
            if waiting and not moved:
                raise ScheduleError(self._deadlock(waiting))

    def timeline(self) -> Timeline:
        """The timeline of everything that ran."""
        ledger = self._ledger
        spans = [
            Span(rank, str(action), action.op.value, step, ledger.starts[step][slot], end)
            for step, graph in enumerate(self._graphs)
            for rank, slots in enumerate(graph.ranks)
            for slot in slots
            for action, end in [(graph.actions[slot], ledger.slots[step][slot])]
        ]
        return Timeline(tuple(spans), self._num_ranks, self._graphs[0].program.schedule.pipeline)

    def _walk(self, rank: int) -> bool:
        """Run ``rank`` until it must wait; returns whether it moved."""
        origin = self._place[rank]
        step, place = origin
        ledger = self._ledger
        while step < len(self._graphs):
            order = self._graphs[step].ranks[rank]
            while place < len(order):
                ready = ledger.ready(step, order[place])
                if ready == UNKNOWN:
                    self._place[rank] = (step, place)
                    return (step, place) != origin
                ledger.book(rank, step, order[place], max(ready, ledger.free[rank]))
                place += 1
            self.step_ends[step] = max(self.step_ends[step], ledger.free[rank])
            step, place = step + 1, 0
        self._place[rank] = (step, place)
        return True

    def _deadlock(self, waiting: Sequence[int]) -> str:
        blocked = []
        for rank in waiting:
            step, place = self._place[rank]
            graph = self._graphs[step]
            action = graph.actions[graph.ranks[rank][place]]
            missing = [
                str(need.producer)
                for need in graph.program.needs[action]
                if (slot := graph.slot_of(need.producer, need.consumer)) is not None
                and self._ledger.slots[step][slot] == UNKNOWN
            ]
            what = ", ".join(missing) or "the step before"
            blocked.append(f"rank {rank} at {action} (step {step}) waits for {what}")
        return "the schedule deadlocks: " + "; ".join(blocked)
