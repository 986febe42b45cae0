"""When everything of several consecutive steps ended or arrived, as far as it is known.

The simulator and the list scheduler walk the ranks differently and book every action here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.graph import StepGraph

UNKNOWN = math.inf
"""The time of what nobody has booked yet."""


class Ledger:
    """Times in seconds, from 0.

    Attributes:
        graphs: One per step. Equal steps should be the same object: their costs are read once.
        seconds: Step to the durations of its actions.
        slots: Step to its slots' times.
        starts: Step to the start of each action.
        free: Rank to the end of its last action.
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
        # What the first step's predecessor should have made counts as there from the start.
        self._carried: list[tuple[tuple[int, ...], ...]] = [
            ((),) * len(graph.actions) for graph in graphs[:1]
        ] + [carried[id(before), id(graph)] for before, graph in pairwise(graphs)]
        self.slots = [[UNKNOWN] * graph.num_slots for graph in graphs]
        self.starts = [[UNKNOWN] * len(graph.actions) for graph in graphs]
        self.free = [0.0] * (len(graphs[0].ranks) if graphs else 0)
        self._latency = costs.latency
        self._links: dict[tuple[int, int], float] = {}

    def ready(self, step: int, slot: int) -> float:
        """When all that an action waits for is there; ``UNKNOWN`` as long as a part is."""
        times = self.slots[step]
        ready = 0.0
        for wait in self.graphs[step].waits[slot]:
            ready = max(ready, times[wait])
        carried = self._carried[step][slot]
        if carried:
            before = self.slots[step - 1]
            ready = max(ready, *(before[wait] for wait in carried))
        return ready

    def book(self, rank: int, step: int, slot: int, start: float) -> float:
        """Run an action at ``start`` and send what it makes; when it ends."""
        end = start + self.seconds[step][slot]
        times = self.slots[step]
        self.starts[step][slot] = start
        times[slot] = self.free[rank] = end
        for arrival, target, message in self.graphs[step].sends[slot]:
            # Messages of one link queue for its bandwidth; their latencies overlap.
            idle = self._links.get((rank, target), 0.0)
            sent = max(end, idle) + self._occupancy[step][message]
            self._links[rank, target] = sent
            times[arrival] = sent + self._latency
        return end

    def arrivals(self, step: int, slot: int) -> Iterator[tuple[float, int]]:
        """Time and rank of what a booked action sends."""
        for arrival, target, _ in self.graphs[step].sends[slot]:
            yield self.slots[step][arrival], target
