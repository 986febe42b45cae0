"""Event times of consecutive steps: the ends of actions and the arrivals of messages.

The simulator and the list scheduler walk the ranks differently, and record every action here. With
replicas of the pipeline, a rank's optimizer step waits until its gradients are summed over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_tspipe.ir.action import Op
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.graph import StepGraph

UNKNOWN = math.inf
"""The time of an event that is not recorded yet."""

NUM_BUCKETS = 8
"""Number of equal parts in which a rank's gradients are computed and reduced over replicas."""


class Ledger:
    """Event times in seconds, from 0.

    Attributes:
        graphs: One per step. Equal steps should be the same object: their costs are read once.
        seconds: For each step, the durations of its actions.
        slots: For each step, the times of its slots.
        starts: For each step, the start of each action.
        free: For each rank, the end of its last action.
    """

    def __init__(self, graphs: Sequence[StepGraph], costs: CostTable) -> None:
        self.graphs = graphs
        distinct = {id(graph): graph for graph in graphs}
        seconds = {key: graph.seconds(costs) for key, graph in distinct.items()}
        occupancy = {key: graph.occupancy(costs) for key, graph in distinct.items()}
        carried = {
            (id(before), id(graph)): graph.carried_slots(before)
            for before, graph in {(id(a), id(b)): (a, b) for a, b in pairwise(graphs)}.values()
        }
        self.seconds = [seconds[id(graph)] for graph in graphs]
        self._occupancy = [occupancy[id(graph)] for graph in graphs]
        # Results of a step before the first one count as available from the start.
        self._carried: list[tuple[tuple[int, ...], ...]] = [
            ((),) * len(graph.actions) for graph in graphs[:1]
        ] + [carried[id(before), id(graph)] for before, graph in pairwise(graphs)]
        self.slots = [[UNKNOWN] * graph.num_slots for graph in graphs]
        self.starts = [[UNKNOWN] * len(graph.actions) for graph in graphs]
        self.free = [0.0] * (len(graphs[0].ranks) if graphs else 0)
        latencies = {
            key: [costs.latency_seconds(message) for message in graph.program.messages]
            for key, graph in distinct.items()
        }
        self._latencies = [latencies[id(graph)] for graph in graphs]
        self._links: dict[tuple[int, int], float] = {}
        self._reduction = costs.reduction if any(costs.reduction) else ()
        self._reduced = [0.0] * len(self.free)
        gradients = {key: self._ranks_of(_GRADIENTS, graph) for key, graph in distinct.items()}
        optimizers = {key: self._ranks_of(_OPTIMIZER, graph) for key, graph in distinct.items()}
        self._gradients = [gradients[id(graph)] for graph in graphs]
        self._optimizers = [optimizers[id(graph)] for graph in graphs]

    def _ranks_of(self, ops: frozenset[Op], graph: StepGraph) -> dict[int, int]:
        """Ranks of the actions with some ops, by slot; empty without a reduction."""
        if not self._reduction:
            return {}
        return {
            slot: rank
            for rank, slots in enumerate(graph.ranks)
            for slot in slots
            if graph.actions[slot].op in ops
        }

    def ready(self, step: int, slot: int) -> float:
        """Time when all dependencies of an action are available, or ``UNKNOWN``."""
        times = self.slots[step]
        ready = 0.0
        for wait in self.graphs[step].waits[slot]:
            ready = max(ready, times[wait])
        carried = self._carried[step][slot]
        if carried:
            before = self.slots[step - 1]
            ready = max(ready, *(before[wait] for wait in carried))
        if slot in self._optimizers[step]:
            ready = max(ready, self._reduced[self._optimizers[step][slot]])
        return ready

    def book(self, rank: int, step: int, slot: int, start: float) -> float:
        """Record an action at ``start``, with its messages; returns when it ends."""
        end = start + self.seconds[step][slot]
        times = self.slots[step]
        self.starts[step][slot] = start
        times[slot] = self.free[rank] = end
        for arrival, target, message in self.graphs[step].sends[slot]:
            # Messages of one link queue for its bandwidth; their latencies overlap.
            idle = self._links.get((rank, target), 0.0)
            sent = max(end, idle) + self._occupancy[step][message]
            self._links[rank, target] = sent
            times[arrival] = sent + self._latencies[step][message]
        if slot in self._gradients[step]:
            self._reduced[rank] = _reduced_at(start, end, self._reduction[rank])
        return end

    def arrivals(self, step: int, slot: int) -> Iterator[tuple[float, int]]:
        """Arrival times and ranks of an action's messages, and of its reduced gradients."""
        for arrival, target, _ in self.graphs[step].sends[slot]:
            yield self.slots[step][arrival], target
        if slot in self._gradients[step]:
            rank = self._gradients[step][slot]
            yield self._reduced[rank], rank


_GRADIENTS = frozenset({Op.BACKWARD, Op.WEIGHT_BACKWARD})
_OPTIMIZER = frozenset({Op.OPTIMIZER})


def _reduced_at(start: float, end: float, seconds: float) -> float:
    """Time when the gradients are reduced over the replicas, given a rank's last backward.

    Gradients are sent in buckets during the backward, as in DistributedDataParallel (Li et al.,
    VLDB 2020, section 3.2): the last bucket leaves at the end, unless the link has been busy since
    the first one. Actions after the last backward, the teacher's forwards, hide the rest.
    """
    bucket = 1 / NUM_BUCKETS
    return max(end + bucket * seconds, start + bucket * (end - start) + seconds)
