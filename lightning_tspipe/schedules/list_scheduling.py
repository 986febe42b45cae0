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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import UNKNOWN, StepGraph, Walk


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


_STEPS = 5
_MIDDLE = 3
"""The step whose order is taken: by then the walk is in its steady state."""


def list_schedule(
    graph: StepGraph, costs: CostTable, policy: Policy, *, repeats: bool
) -> tuple[tuple[Action, ...], ...]:
    """Find an order for a step.

    Args:
        graph: The actions of the step; their order on a rank determines only which come first and
            last, and the order of the units within each stage.
        costs: Costs of the same pipeline.
        policy: The rule for choosing actions.
        repeats: Whether steps like this one precede and follow it.

    Returns:
        The actions of each rank.
    """
    orders = _Walk([graph] * (_STEPS if repeats else 1), costs, policy).orders
    ranks = orders[_MIDDLE if repeats else 0]
    return tuple(tuple(graph.actions[slot] for slot in rank) for rank in ranks)


def list_step_time(graph: StepGraph, costs: CostTable, policy: Policy) -> float:
    """Simulated seconds per step of the list schedule, without the first two steps."""
    ends = _Walk([graph] * _STEPS, costs, policy).step_ends
    return (ends[-1] - ends[1]) / (_STEPS - 2)


_FIRST = frozenset({Op.EFFECTS, Op.DATA})


class _Queue:
    """The actions of one op and stage on one rank, which keep their order."""

    def __init__(self, action: Action, policy: Policy) -> None:
        self.slots: deque[int] = deque()
        self.op = action.op
        ahead = action.op is Op.TEACHER and action.batch > 0
        self.filler = ahead or action.op is Op.WEIGHT_BACKWARD
        self.key = _urgency(action, policy)


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


_FIXED_URGENCY = {
    Op.EFFECTS: 0, Op.DATA: 0, Op.LOSS: 1, Op.PROLOGUE: 1, Op.TEACHER: 3, Op.OPTIMIZER: 8
}  # fmt: skip


class _Walk(Walk):
    """A walk in which ranks choose by a policy."""

    def __init__(self, graphs: Sequence[StepGraph], costs: CostTable, policy: Policy) -> None:
        self._policy = policy
        self._queues: dict[int, list[_Queue]] = {}
        super().__init__(graphs, costs)

    @override
    def choose(self, rank: int, now: float) -> int | None:
        """The head of the most urgent queue that may start."""
        step = self.step[rank]
        queues = self._queues[rank] = self._queues.get(rank) or self._queues_of(step, rank)
        urgent_at = UNKNOWN
        for queue in _open(queues):
            slot = queue.slots[0]
            ready = self.ready(step, slot)
            if ready > now:
                urgent_at = urgent_at if queue.filler else min(urgent_at, ready)
                continue
            patience = self._policy.patience * self.prices[step].actions[slot]
            if not queue.filler or urgent_at - now >= patience:
                queue.slots.popleft()
                if not queue.slots:
                    queues.remove(queue)
                return slot
        return None

    def _queues_of(self, step: int, rank: int) -> list[_Queue]:
        graph = self.graphs[step]
        queues: dict[tuple[Op, int, int], _Queue] = {}
        for slot in graph.ranks[rank]:
            action = graph.actions[slot]
            # The opening is one queue, so that it keeps its order.
            opening = action.op in _FIRST
            key = (Op.EFFECTS, -1, 0) if opening else (action.op, action.stage, action.batch)
            queues.setdefault(key, _Queue(action, self._policy)).slots.append(slot)
        return sorted(queues.values(), key=lambda queue: queue.key)


def _open(queues: list[_Queue]) -> list[_Queue]:
    """The queues that may start: the opening alone; the optimizer after everything else."""
    if queues[0].op in _FIRST:
        return queues[:1]
    return queues if len(queues) == 1 else queues[:-1]
