"""Weight versions that the actions of an epoch read; each action runs exactly once.

A single step cannot show whether a missing forward ran before; all steps of an epoch can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import depends_on
from lightning_tspipe.ir.schedule import Schedule, walk

_BACKWARDS = frozenset({Op.BACKWARD, Op.INPUT_BACKWARD})


def versions(steps: Sequence[Schedule]) -> dict[Action, int]:
    """Find the weight versions in an epoch whose steps each end with an update.

    Args:
        steps: The schedules of the steps of batch 0, 1, 2, ...

    Returns:
        For each forward and backward, with the number of its batch, the number of updates that its
        rank had made before. A forward of batch i that reads version v, and whose backward reads
        version i, is late by ``i - v`` updates.

    Raises:
        ScheduleError: An action runs twice or not at all, or the ranks deadlock.
    """
    pipeline = steps[0].pipeline
    lists = [
        [
            replace(action, batch=action.batch + number)
            for number, step in enumerate(steps)
            for action in step.ranks[rank]
        ]
        for rank in range(pipeline.num_ranks)
    ]
    split = frozenset(stage for step in steps for stage in step.split)
    places, updates = [0] * len(lists), [0] * len(lists)
    found: dict[Action, int] = {}
    done: set[Action] = set()

    def is_ready(action: Action) -> bool:
        return all(need.producer in done for need in depends_on(action, pipeline, split))

    for rank, action in walk(lists, is_ready):
        if action in done and action.op is not Op.DATA:  # a step may tell of it early
            raise ScheduleError(f"{action} is done twice")
        done.add(action)
        if not action.op.is_rank_wide:
            found[action] = updates[rank]
        updates[rank] += action.op is Op.OPTIMIZER
        places[rank] += 1
    blocked = [str(a[i]) for a, i in zip(lists, places, strict=True) if i < len(a)]
    if blocked:
        raise ScheduleError(f"the ranks wait for each other for ever: at {', '.join(blocked)}")
    _check_all_trained(found, len(steps))
    return found


def _check_all_trained(found: dict[Action, int], num_batches: int) -> None:
    for action in found:
        if action.batch >= num_batches:
            raise ScheduleError(f"{action} belongs to a batch behind the last one")
        if action.op is Op.FORWARD and not any(
            replace(action, op=op) in found for op in _BACKWARDS
        ):
            raise ScheduleError(f"{action} has no backward")
