"""Simulation of a schedule: every rank in order, transfers beside the computation.

A rank starts its next action as soon as the one before has ended and everything that it waits for
is available. A message leaves when its producer ends, queues for its link, and takes ``bytes /
bandwidth + latency``. There is no barrier between steps: a rank begins step n + 1 right after its
own optimizer step n. With replicas of the pipeline, that step waits until the rank's gradients are
summed over them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.timeline import Span, Timeline

STEADY_STEPS = 6
"""Steps after which a pipeline is in its steady state."""

UNKNOWN = math.inf
"""The time of an event that has not happened yet."""

NUM_BUCKETS = 8
"""Number of equal parts in which a rank's gradients are computed and reduced over replicas."""

_GRADIENTS = frozenset({Op.BACKWARD, Op.WEIGHT_BACKWARD})


@dataclass(frozen=True, eq=False)
class StepGraph:
    """One step of all ranks, as integers.

    Every action and every message of a step has a *slot*, which holds the time when the action
    ended or the message arrived::

        slots:  [ action 0 | action 1 | ... | message 0 | message 1 | ... ]

    An action waits for slots of its own step, and for slots of the step before (a loss waits for
    the teacher forwards that ran ahead).

    Attributes:
        actions: All actions; an action's index is its slot.
        ranks: Actions of each rank, in order.
        waits: For each action, the slots of this step that it waits for.
        carried: For each action, the (producer, consumer) pairs of the step before that it waits
            for, as that step names them.
        sends: For each action, the messages sent right after it: (slot, target rank, message).
        arrivals: Slot of the message of each (producer, consumer) pair.
        index: Slot of each action.
    """

    schedule: Schedule
    actions: tuple[Action, ...]
    ranks: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    carried: tuple[tuple[tuple[Action, Action], ...], ...]
    sends: tuple[tuple[tuple[int, int, int], ...], ...]
    arrivals: dict[tuple[Action, Action], int]
    index: dict[Action, int]

    @classmethod
    def of(cls, schedule: Schedule) -> StepGraph:
        """Number the actions and messages of ``schedule``."""
        actions = schedule.actions
        index = {action: slot for slot, action in enumerate(actions)}
        arrivals: dict[tuple[Action, Action], int] = {}
        sends: list[list[tuple[int, int, int]]] = [[] for _ in actions]
        for place, message in enumerate(schedule.messages):
            slot = arrivals[message.producer, message.consumer] = len(actions) + place
            sends[index[message.producer]].append((slot, message.target, place))
        needs = [[need.producer for need in schedule.needs[action]] for action in actions]
        first = schedule.pipeline.loss_ranks[0]
        trained = max(1, sum(a.op is Op.LOSS and a.stage == first for a in actions))
        later = partial(_later, trained)
        return cls(
            schedule=schedule,
            actions=actions,
            ranks=tuple(tuple(map(index.__getitem__, r)) for r in schedule.ranks),
            waits=tuple(
                tuple(arrivals.get((one, action), index[one]) for one in ones if one in index)
                for action, ones in zip(actions, needs, strict=True)
            ),
            carried=tuple(
                tuple((later(one), later(action)) for one in ones if one not in index)
                for action, ones in zip(actions, needs, strict=True)
            ),
            sends=tuple(map(tuple, sends)),
            arrivals=arrivals,
            index=index,
        )

    def carried_slots(self, before: StepGraph) -> tuple[tuple[int, ...], ...]:
        """For each action, the slots of the step ``before`` that it waits for.

        Actions that the step before didn't run count as done: a timeline may start in the steady
        state.
        """
        found = ([before.slot_of(*pair) for pair in pairs] for pairs in self.carried)
        return tuple(tuple(slot for slot in slots if slot is not None) for slots in found)

    def slot_of(self, producer: Action, consumer: Action) -> int | None:
        """The slot that ``consumer`` waits for; None if this step doesn't run ``producer``."""
        slot = self.arrivals.get((producer, consumer))
        return self.index.get(producer) if slot is None else slot


def _later(batches: int, action: Action) -> Action:
    """An action as the step before names it, which has trained so many batches."""
    return replace(action, batch=action.batch + batches)


def simulate(steps: Sequence[Schedule], costs: CostTable) -> Timeline:
    """Simulate consecutive steps.

    Args:
        steps: For example warm-up, steady, steady, last.
        costs: Costs of the pipeline of these steps.

    Raises:
        ScheduleError: The schedule deadlocks; names the blocked actions.
    """
    if not steps:
        return Timeline((), 0)
    costs.check(steps[0].pipeline)
    walk = Walk(list(map(cache(StepGraph.of), steps)), costs)
    spans = [
        Span(rank, str(action), action.op.value, step, walk.starts[step][slot], end)
        for step, graph in enumerate(walk.graphs)
        for rank, slots in enumerate(graph.ranks)
        for slot in slots
        for action, end in [(graph.actions[slot], walk.slots[step][slot])]
    ]
    return Timeline(tuple(spans), len(walk.free), steps[0].pipeline)


def steady_step_time(schedule: Schedule, costs: CostTable) -> float:
    """Seconds per step when ``schedule`` repeats, after the first steps.

    Raises:
        ScheduleError: The schedule deadlocks.
    """
    return graph_step_time(StepGraph.of(schedule), costs)


def graph_step_time(graph: StepGraph, costs: CostTable) -> float:
    """As :func:`steady_step_time`, for a step that is numbered already."""
    ends = Walk([graph] * STEADY_STEPS, costs).step_ends
    # The first half of the steps is a warm-up.
    half = STEADY_STEPS // 2
    return (ends[-1] - ends[-1 - half]) / half


def steps_seconds(steps: Sequence[Schedule], costs: CostTable) -> float:
    """Seconds of consecutive steps that start with every rank idle.

    Raises:
        ScheduleError: The schedule deadlocks.
    """
    return Walk(list(map(cache(StepGraph.of), steps)), costs).step_ends[-1]


def graph_seconds(graph: StepGraph, costs: CostTable) -> float:
    """Seconds of one step that starts with every rank idle."""
    return Walk([graph], costs).step_ends[-1]


class _Prices:
    """Seconds of a step's actions, and of its messages on their links."""

    def __init__(self, graph: StepGraph, costs: CostTable) -> None:
        messages = graph.schedule.messages
        links = [costs.link(message.source, message.target) for message in messages]
        self.actions = [costs.seconds(action) for action in graph.actions]
        self.latencies = [latency for latency, _ in links]
        sizes = zip(map(costs.message_bytes, messages), links, strict=True)
        self.occupancy = [size / bandwidth for size, (_, bandwidth) in sizes]


class Walk:
    """Walks all ranks through consecutive steps, each rank in its order.

    Whenever a rank's action ends, or something arrives at an idle rank, the rank chooses what it
    runs next; a subclass may choose by another rule.

    Args:
        graphs: One per step. Equal steps should be the same object: their costs are read once.
        costs: Costs of the pipeline.

    Attributes:
        slots: For each step, the times of its slots, in seconds from 0.
        starts: For each step, the start of each action.
        orders: For each step and rank, the slots of the actions that ran.
        free: For each rank, the end of its last action.
        step_ends: When each step's last rank is done.

    Raises:
        ScheduleError: The schedule deadlocks.
    """

    def __init__(self, graphs: Sequence[StepGraph], costs: CostTable) -> None:
        ranks = range(len(graphs[0].ranks))
        self.graphs = graphs
        self.prices = list(map(cache(partial(_Prices, costs=costs)), graphs))
        carried = cache(StepGraph.carried_slots)
        # Results of a step before the first one count as available from the start.
        nothing: tuple[tuple[int, ...], ...] = ((),) * len(graphs[0].actions)
        pairs = pairwise(graphs)
        self._carried = [nothing, *(carried(graph, before) for before, graph in pairs)]
        self.slots = [[UNKNOWN] * (len(graph.actions) + len(graph.arrivals)) for graph in graphs]
        self.starts = [[UNKNOWN] * len(graph.actions) for graph in graphs]
        self.orders: list[list[list[int]]] = [[[] for _ in ranks] for _ in graphs]
        self.free = [0.0 for _ in ranks]
        self.step = [0 for _ in ranks]
        self.step_ends = [0.0] * len(graphs)
        self._events = [(0.0, rank) for rank in ranks]
        self._links: dict[tuple[int, int], float] = {}
        self._reduction = costs.reduction if any(costs.reduction) else ()
        self._reduced = [0.0 for _ in ranks]
        self._run()

    def choose(self, rank: int, now: float) -> int | None:
        """The next action of an idle rank; None: sleep until something arrives."""
        step = self.step[rank]
        slot = self.graphs[step].ranks[rank][len(self.orders[step][rank])]
        return slot if self.ready(step, slot) <= now else None

    def ready(self, step: int, slot: int) -> float:
        """Time when all dependencies of an action are available, or ``UNKNOWN``."""
        graph, times = self.graphs[step], self.slots[step]
        ready = 0.0
        for wait in graph.waits[slot]:
            ready = max(ready, times[wait])
        for wait in self._carried[step][slot]:
            ready = max(ready, self.slots[step - 1][wait])
        if self._reduction and graph.actions[slot].op is Op.OPTIMIZER:
            ready = max(ready, self._reduced[graph.actions[slot].stage])
        return ready

    def _run(self) -> None:
        while self._events:
            now, rank = heapq.heappop(self._events)
            # An event while the rank is busy is dropped: the end of its action is an event too.
            if now >= self.free[rank] and self.step[rank] < len(self.graphs):
                slot = self.choose(rank, now)
                if slot is not None:
                    self._start(rank, now, slot)
        waiting = [rank for rank, step in enumerate(self.step) if step < len(self.graphs)]
        if waiting:
            raise ScheduleError("the schedule deadlocks: " + "; ".join(map(self._blocked, waiting)))

    def _start(self, rank: int, start: float, slot: int) -> None:
        """Run an action, and send its messages."""
        step = self.step[rank]
        graph, prices, times = self.graphs[step], self.prices[step], self.slots[step]
        end = start + prices.actions[slot]
        self.starts[step][slot] = start
        times[slot] = self.free[rank] = end
        heapq.heappush(self._events, (end, rank))
        for arrival, target, message in graph.sends[slot]:
            # Messages of one link queue for its bandwidth; their latencies overlap.
            idle = self._links.get((rank, target), 0.0)
            sent = max(end, idle) + prices.occupancy[message]
            self._links[rank, target] = sent
            times[arrival] = sent + prices.latencies[message]
            heapq.heappush(self._events, (times[arrival], target))
        if self._reduction and graph.actions[slot].op in _GRADIENTS:
            self._reduced[rank] = end + exposed_reduction(self._reduction[rank], end - start)
            heapq.heappush(self._events, (self._reduced[rank], rank))
        order = self.orders[step][rank]
        order.append(slot)
        if len(order) == len(graph.ranks[rank]):
            self.step_ends[step] = max(self.step_ends[step], end)
            self.step[rank] += 1

    def _blocked(self, rank: int) -> str:
        """Says what a rank waits for."""
        step = self.step[rank]
        graph = self.graphs[step]
        action = graph.actions[graph.ranks[rank][len(self.orders[step][rank])]]
        missing = [
            str(need.producer)
            for need in graph.schedule.needs[action]
            if (slot := graph.slot_of(need.producer, need.consumer)) is not None
            and self.slots[step][slot] == UNKNOWN
        ]
        what = ", ".join(missing) or "the step before"
        return f"rank {rank} at {action} (step {step}) waits for {what}"


def exposed_reduction(reduction: float, backward: float) -> float:
    """Seconds of summing gradients over the replicas that a rank's last backward cannot hide.

    Gradients are sent in buckets during the backward, as in DistributedDataParallel (Li et al.,
    VLDB 2020, section 3.2): the last bucket leaves at the end, unless the link has been busy since
    the first one. Actions after the last backward, the teacher's forwards, hide the rest.
    """
    bucket = 1 / NUM_BUCKETS
    return max(bucket * reduction, reduction - (1 - bucket) * backward)
