"""A schedule as a graph of integers, for the simulator and the list scheduler.

Every action and every message of a step has a *slot*, which holds the time when the action ended or
the message arrived::

    slots:  [ action 0 | action 1 | ... | message 0 | message 1 | ... ]

An action waits for slots of its own step, and for slots of the step before (a loss waits for the
teacher forwards that ran ahead).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from lightning_tspipe.ir.action import Action
from lightning_tspipe.ir.schedule import Schedule


@dataclass(frozen=True, eq=False)
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
        actions = tuple(chain.from_iterable(schedule.ranks))
        index = {action: slot for slot, action in enumerate(actions)}
        arrivals = {
            (message.producer, message.consumer): slot
            for slot, message in enumerate(schedule.messages, start=len(actions))
        }
        sends: list[list[tuple[int, int, int]]] = [[] for _ in actions]
        for place, message in enumerate(schedule.messages):
            slot = len(actions) + place
            sends[index[message.producer]].append((slot, message.target, place))
        needs = [[need.producer for need in schedule.needs[action]] for action in actions]
        return cls(
            schedule=schedule,
            actions=actions,
            ranks=tuple(tuple(map(index.__getitem__, r)) for r in schedule.ranks),
            waits=tuple(
                tuple(arrivals.get((one, action), index[one]) for one in ones if one in index)
                for action, ones in zip(actions, needs, strict=True)
            ),
            carried=tuple(
                tuple((_next_batch(one), _next_batch(action)) for one in ones if one not in index)
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
        return tuple(
            tuple(slot for pair in pairs if (slot := before.slot_of(*pair)) is not None)
            for pairs in self.carried
        )

    def slot_of(self, producer: Action, consumer: Action) -> int | None:
        """The slot that ``consumer`` waits for; None if this step doesn't run ``producer``."""
        slot = self.arrivals.get((producer, consumer))
        return self.index.get(producer) if slot is None else slot


def _next_batch(action: Action) -> Action:
    return replace(action, batch=action.batch + 1)
