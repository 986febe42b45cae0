"""State of one step while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import Program
from lightning_tspipe.runtime.stages.units import StepUnits


@dataclass
class StepContext:
    """What the executor needs to know about one step.

    Attributes:
        index: Number of the step.
        program: What all ranks do.
        units: Units of the batches worked on, by offset (0: this batch, 1: the next, ...).
        inputs: On the data rank, the call inputs of the same batches.
        result: What the step returns, on a rank that computes a loss.
    """

    index: int
    program: Program
    units: dict[int, StepUnits]
    inputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    result: Any = None

    def runs(self, action: Action) -> bool:
        """Whether there is anything to do in an action: a small batch leaves units empty."""
        return action.unit is None or self.units[action.batch].runs(action)


@cache
def base_of(action: Action) -> Action:
    """The action without its batch offset."""
    return Action(action.op, action.stage, action.unit)


@cache
def backward_of(action: Action) -> Action:
    """The backward of the same stage and unit."""
    return Action(Op.BACKWARD, action.stage, action.unit)
