"""One batch on its way through a pass of blocks, as one rank has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.ir.action import Action
from lightning_tspipe.ir.lowering import Message
from lightning_tspipe.runtime.execution.context import StepContext


@dataclass(frozen=True)
class BlockOutcome:
    """What a block's loss is on this rank.

    Attributes:
        loss: With its graph, or what stands for it, weighed by the rank's share of the batch: the
            ranks' losses and gradients add up to those of the whole batch.
        value: The mean over this rank's samples, without a graph.
        samples: How many these are.
    """

    loss: Tensor
    value: Tensor
    samples: int


@dataclass
class RelayStep(StepContext):
    """One batch on its way through a pass.

    Attributes:
        own: This rank's share of its samples: the first, and one after the last.
        samples: How many there are in all.
        x: On the data rank, what the first block gets.
        asked: The messages that will come, in the order of the samples.
        fields: Gives the batch as the losses of a share see it.
        received: What the teacher gets.
        relayed: What it passes on.
        taken: For each block that is trained, what it gets.
        targets: What it is to give.
        outcomes: Of its loss.
    """

    own: tuple[int, int] = (0, 0)
    samples: int = 0
    x: Tensor | None = None
    asked: Sequence[Message] = ()
    fields: Callable[[tuple[int, int]], Any] = lambda _: None
    received: Tensor | None = None
    relayed: Tensor | None = None
    taken: dict[int, Tensor] = field(default_factory=dict)
    targets: dict[int, Tensor] = field(default_factory=dict)
    outcomes: dict[int, BlockOutcome] = field(default_factory=dict)

    @override
    def runs(self, action: Action) -> bool:
        return True  # also for a share without samples: others wait for what it sends
