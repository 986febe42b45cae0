"""An order that follows from the costs: list scheduling over several consecutive steps.

All ranks are walked through time. Whenever a rank is free it takes the most urgent action whose
inputs are available; actions that others wait for come first (loss, backward, forward), and actions
that nobody waits for in this step fill the gaps (weight gradients, the teacher of the next batch)::

    free ──► urgent ready? ──yes──► run it
                 │ no
                 ▼
             filler ready? ──no───► sleep until something arrives
                 │ yes
                 ▼
             urgent arrives within patience x filler's duration? ──yes──► sleep until then
                 │ no
                 ▼
             run the filler

Zero-bubble schedules are found in the same way (Qi et al., ICLR 2024, section 3.1); the teacher as
a filler is TSPipe's (Lim et al., ICML 2022).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.graph import StepGraph
from lightning_tspipe.simulation.ledger import UNKNOWN, Ledger


@dataclass(frozen=True, slots=True)
class Policy:
    """The rule by which a free rank chooses its next action.

    Attributes:
        patience: A filler does not start if an urgent action is known to become ready within this
            share of the filler's duration.
        weights_first: Whether weight gradients come before teacher forwards.
        deep_first: Whether the deepest stage comes first among forwards of several stages.
    """

    patience: float
    weights_first: bool = True
    deep_first: bool = False


def list_schedule(
    graphs: Sequence[StepGraph], costs: CostTable, policy: Policy
) -> list[tuple[tuple[Action, ...], ...]]:
    """Find an order for consecutive steps.

    Args:
        graphs: The actions of each step; their order on a rank determines only which come first and
            last, and the order of the units within each stage.
        costs: Costs of the same pipeline.
        policy: The rule for choosing actions.

    Returns:
        For each step, the actions of each rank.
    """
    walk = _Walk(graphs, costs, policy)
    walk.run()
    return [
        tuple(tuple(graph.actions[slot] for slot in rank) for rank in orders)
        for graph, orders in zip(graphs, walk.orders, strict=True)
    ]


def list_step_time(graphs: Sequence[StepGraph], costs: CostTable, policy: Policy) -> float:
    """Simulated seconds per step of the list schedule, without the first two steps."""
    walk = _Walk(graphs, costs, policy)
    walk.run()
    return (walk.step_ends[-1] - walk.step_ends[1]) / (len(graphs) - 2)


_FIRST = frozenset({Op.EFFECTS, Op.DATA})


class _Queue:
    """The actions of one op and stage on one rank, which keep their order."""

    def __init__(self, action: Action, policy: Policy) -> None:
        self.slots: list[int] = []
        self.place = 0
        self.op = action.op
        ahead = action.op is Op.TEACHER and action.batch > 0
        self.filler = ahead or action.op is Op.WEIGHT_BACKWARD
        self.key = _urgency(action, policy)

    @property
    def head(self) -> int:
        """The next action."""
        return self.slots[self.place]


def _urgency(action: Action, policy: Policy) -> tuple[int, int]:
    """Sort key: actions that most others wait for come first, then those farthest from the end."""
    if action.op is Op.TEACHER and action.batch > 0:
        return (6, action.stage)
    if action.op is Op.FORWARD:
        return (4, -action.stage if policy.deep_first else action.stage)
    if action.op is Op.WEIGHT_BACKWARD:
        return (5 if policy.weights_first else 7, -action.stage)
    if action.op in {Op.BACKWARD, Op.INPUT_BACKWARD}:
        return (2, -action.stage)
    return (_FIXED_URGENCY[action.op], action.stage)


_FIXED_URGENCY = {Op.EFFECTS: 0, Op.DATA: 0, Op.LOSS: 1, Op.TEACHER: 3, Op.OPTIMIZER: 8}


class _Walk:
    """The state of the walk: the remaining actions of each rank, and future events."""

    def __init__(self, graphs: Sequence[StepGraph], costs: CostTable, policy: Policy) -> None:
        self._graphs, self._policy = graphs, policy
        self._ledger = Ledger(graphs, costs)
        num_ranks = len(graphs[0].ranks)
        self._step = [0] * num_ranks
        self._queues = [self._queues_of(0, rank) for rank in range(num_ranks)]
        self._events = [(0.0, rank) for rank in range(num_ranks)]
        self.orders: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in graphs]
        self.step_ends = [0.0] * len(graphs)

    def run(self) -> None:
        """Walk until every rank is done with all steps."""
        while self._events:
            now, rank = heapq.heappop(self._events)
            # An event while the rank is busy is dropped: the end of its action is an event too.
            if now >= self._ledger.free[rank] and self._step[rank] < len(self._graphs):
                queue = self._choose(rank, now)
                if queue is not None:
                    self._start(rank, now, queue)

    def _queues_of(self, step: int, rank: int) -> list[_Queue]:
        graph = self._graphs[step]
        queues: dict[tuple[Op, int, int], _Queue] = {}
        for slot in graph.ranks[rank]:
            action = graph.actions[slot]
            # The opening is one queue, so that it keeps its order.
            opening = action.op in _FIRST
            key = (Op.EFFECTS, -1, 0) if opening else (action.op, action.stage, action.batch)
            queues.setdefault(key, _Queue(action, self._policy)).slots.append(slot)
        return sorted(queues.values(), key=lambda queue: queue.key)

    def _choose(self, rank: int, now: float) -> _Queue | None:
        """The most urgent queue whose head may start; None: sleep until something arrives."""
        step = self._step[rank]
        urgent_at = UNKNOWN
        for queue in self._open(rank):
            ready = self._ledger.ready(step, queue.head)
            if ready > now:
                urgent_at = urgent_at if queue.filler else min(urgent_at, ready)
                continue
            duration = self._ledger.seconds[step][queue.head]
            if not queue.filler or urgent_at - now >= self._policy.patience * duration:
                return queue
        return None

    def _open(self, rank: int) -> list[_Queue]:
        """The queues that may start: the opening alone; the optimizer after everything else."""
        queues = self._queues[rank]
        if queues[0].op in _FIRST:
            return queues[:1]
        return queues if len(queues) == 1 else queues[:-1]

    def _start(self, rank: int, now: float, queue: _Queue) -> None:
        step, slot = self._step[rank], queue.head
        end = self._ledger.book(rank, step, slot, now)
        for event in (*self._ledger.arrivals(step, slot), (end, rank)):
            heapq.heappush(self._events, event)
        self.orders[step][rank].append(slot)
        queue.place += 1
        if queue.place == len(queue.slots):
            self._queues[rank].remove(queue)
        if not self._queues[rank]:
            self.step_ends[step] = max(self.step_ends[step], end)
            self._step[rank] = step + 1
            if step + 1 < len(self._graphs):
                self._queues[rank] = self._queues_of(step + 1, rank)
