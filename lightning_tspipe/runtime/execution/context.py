"""What the executor keeps of a step, and under which keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from torch import Tensor

from lightning_tspipe.capture.plan import ValueRef
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import Message, Program
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.split_backward import SplitBackward
from lightning_tspipe.runtime.stages.units import StepUnits

Key = tuple[int, Action]


@dataclass
class Saved:
    """What a forward keeps for its backward."""

    inputs: Tensors
    results: list[Tensor]
    recyclable: list[Tensor]
    split: SplitBackward | None = None


class UnderWay(NamedTuple):
    """What a rank holds of batches that work has begun on; may be added to.

    Attributes:
        received: What other ranks sent, by batch and the forward that reads it.
        outputs: What the loss reads, by batch and the forward that made it.
        inputs: What each forward got whose backward is still to come, by batch, stage and unit.
    """

    received: dict[Key, Tensors]
    outputs: dict[Key, dict[ValueRef, Tensor]]
    inputs: dict[tuple[int, int, int], Tensors]


@dataclass
class StepContext:
    """What the executor needs to know about one step.

    Attributes:
        index: Number of the step.
        program: What all ranks do.
        units: Units of the batches worked on, by offset (0: this batch, 1: the next, ...).
        inputs: On the data rank, the call inputs of the same batches.
    """

    index: int
    program: Program
    units: dict[int, StepUnits]
    inputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


def has_backward(units: StepUnits, action: Action) -> bool:
    """Whether a forward keeps its graph."""
    return units.of(action).grad and action.op is Op.FORWARD


@cache
def base_of(action: Action) -> Action:
    """The action without its batch offset."""
    return Action(action.op, action.stage, action.unit)


@cache
def backward_of(action: Action) -> Action:
    """The backward of the same stage and unit."""
    return Action(Op.BACKWARD, action.stage, action.unit)


def unshared(inputs: Tensors, made: Tensors) -> list[Tensor]:
    """The inputs whose memory nothing that was made of them uses."""
    used = {tensor.untyped_storage().data_ptr() for tensor in made}
    return [tensor for tensor in inputs if tensor.untyped_storage().data_ptr() not in used]


def offset_of(message: Message) -> int:
    """How many batches ahead of its step a message is."""
    return message.producer.batch


def receipt_key(batch: int, message: Message) -> tuple[int, Action, Action]:
    """Under which key a message is waited for."""
    return batch, base_of(message.producer), base_of(message.consumer)
