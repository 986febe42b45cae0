"""A program as a graph of integers, for the simulator and the list scheduler.

Every action and every message of a step has a *slot*, which holds the time when the action ended or
the message arrived::

    slots:  [ action 0 | action 1 | ... | message 0 | message 1 | ... ]

An action waits for slots of its own step, and for slots of the step before (a loss waits for the
teacher forwards that ran ahead).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from lightning_tspipe.ir.action import Action
from lightning_tspipe.ir.lowering import Program
from lightning_tspipe.simulation.cost import CostTable


@dataclass(frozen=True)
class StepGraph:
    """One step, all ranks.

    Attributes:
        actions: All actions; an action's index is its slot.
        ranks: Actions of each rank, in order.
        waits: For each action, the slots of this step that it waits for.
        carried: For each action, the (producer, consumer) pairs of the step before that it waits
            for, as that step names them.
        sends: For each action, the messages sent right after it: (slot, target rank, message).
        arrivals: Slot of the message of each (producer, consumer) pair.
        index: Slot of each action.
        num_slots: Number of actions and messages.
    """

    program: Program
    actions: tuple[Action, ...]
    ranks: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    carried: tuple[tuple[tuple[Action, Action], ...], ...]
    sends: tuple[tuple[tuple[int, int, int], ...], ...]
    arrivals: dict[tuple[Action, Action], int]
    index: dict[Action, int]
    num_slots: int

    @classmethod
    def of(cls, program: Program) -> StepGraph:
        """Number the actions and messages of ``program``."""
        actions = tuple(action for rank in program.schedule.ranks for action in rank)
        index = {action: slot for slot, action in enumerate(actions)}
        starts = [0, *accumulate(map(len, program.schedule.ranks))]
        num_actions = len(actions)
        arrivals = {
            (message.producer, message.consumer): num_actions + place
            for place, message in enumerate(program.messages)
        }
        sends: list[list[tuple[int, int, int]]] = [[] for _ in actions]
        for place, message in enumerate(program.messages):
            sends[index[message.producer]].append((num_actions + place, message.target, place))
        waits, carried = _waits(program, index, arrivals)
        return cls(
            program=program,
            actions=actions,
            ranks=tuple(tuple(range(first, last)) for first, last in pairwise(starts)),
            waits=waits,
            carried=carried,
            sends=tuple(map(tuple, sends)),
            arrivals=arrivals,
            index=index,
            num_slots=num_actions + len(program.messages),
        )

    def carried_slots(self, before: StepGraph) -> tuple[tuple[int, ...], ...]:
        """For each action, the slots of the step ``before`` that it waits for.

        Actions that the step before didn't run count as done: a timeline may start in the steady
        state.
        """
        return tuple(
            tuple(slot for pair in pairs if (slot := before.slot_of(*pair)) is not None)
            for pairs in self.carried
        )

    def slot_of(self, producer: Action, consumer: Action) -> int | None:
        """The slot that ``consumer`` waits for; None if this step doesn't run ``producer``."""
        slot = self.arrivals.get((producer, consumer))
        return self.index.get(producer) if slot is None else slot

    def seconds(self, costs: CostTable) -> list[float]:
        """Seconds of every action."""
        return [costs.seconds(action) for action in self.actions]

    def occupancy(self, costs: CostTable) -> list[float]:
        """Seconds that every message occupies its link."""
        return [costs.occupancy_seconds(message) for message in self.program.messages]


def _waits(
    program: Program, index: dict[Action, int], arrivals: dict[tuple[Action, Action], int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[tuple[Action, Action], ...], ...]]:
    waits: list[tuple[int, ...]] = []
    carried: list[tuple[tuple[Action, Action], ...]] = []
    for action in index:
        here, before = [], []
        for dependency in program.needs[action]:
            producer = dependency.producer
            if producer in index:
                here.append(arrivals.get((producer, action), index[producer]))
            else:
                before.append((_next_batch(producer), _next_batch(action)))
        waits.append(tuple(here))
        carried.append(tuple(before))
    return tuple(waits), tuple(carried)


def _next_batch(action: Action) -> Action:
    return replace(action, batch=action.batch + 1)
