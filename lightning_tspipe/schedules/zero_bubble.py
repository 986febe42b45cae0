"""Backwards in two halves: Zero Bubble pipeline parallelism (Qi et al., ICLR 2024, section 2).

The stage before waits only for the gradient of this stage's input (I); the gradients of the weights
(W) can fill a bubble later. So on each rank all I run first::

    rank 0 |  F0F1B1──B0──    |     rank 0 |  F0F1I1I0W1W0  |
    rank 1 |F0F1      B1──B0──|     rank 1 |F0F1    B1──B0──|
"""

from __future__ import annotations

from dataclasses import replace

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.schedule import Schedule


def split_backward(schedule: Schedule, stages: frozenset[int]) -> Schedule:
    """Replace the backwards of ``stages`` by I in place, and W after the rank's last backward."""
    return replace(schedule, ranks=tuple(_split(actions, stages) for actions in schedule.ranks))


def _split(actions: tuple[Action, ...], stages: frozenset[int]) -> tuple[Action, ...]:
    cells: list[Action] = []
    weights: list[Action] = []
    last = 0
    for action in actions:
        if action.op is Op.BACKWARD and action.stage in stages:
            weights.append(replace(action, op=Op.WEIGHT_BACKWARD))
            cells.append(replace(action, op=Op.INPUT_BACKWARD))
        else:
            cells.append(action)
        if action.op is Op.BACKWARD:
            last = len(cells)
    return (*cells[:last], *weights, *cells[last:])
