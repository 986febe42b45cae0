"""One training of the grid: what is trained, on what, and how it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.exactness.modules import ALL_CASES, Trained, make_epochs

State = dict[str, Tensor]

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.05),
}
with suppress(ImportError):  # lightly's: a machine that only shows what a GPU does may lack it
    from lightly.utils.lars import LARS

    OPTIMIZERS["lars"] = lambda p: LARS(p, lr=0.5, momentum=0.9, weight_decay=1e-3)


@dataclass(frozen=True)
class Setting:
    """A training.

    Attributes:
        case: Name in ``modules.ALL_CASES``.
        optimizer: Name in ``OPTIMIZERS``.
        sizes: Batch sizes of each epoch.
        num_ranks: Ranks of the pipeline.
        num_stages: Stages of the student; more than ranks if folded.
        num_microbatches: Micro-batches per call.
        schedule: ``tspipe``, ``gpipe`` or ``sequential``.
        split: Whether the backwards run in two halves.
        accumulate: Batches per optimizer step.
        again: Which atoms of the student run again in the backward: "", "all" or "some".
        backend: Of ``torch.compile``; "" leaves it out.
        predict: Whether what runs ahead reads the teacher predicted by one update.
    """

    case: str
    optimizer: str = "sgd"
    sizes: tuple[tuple[int, ...], ...] = ((5, 5, 2), (5, 5, 2))
    num_ranks: int = 2
    num_stages: int = 2
    num_microbatches: int = 2
    schedule: str = "tspipe"
    split: bool = False
    accumulate: int = 1
    again: str = ""
    backend: str = ""
    predict: bool = False

    def __str__(self) -> str:
        sizes = "|".join(",".join(map(str, epoch)) for epoch in self.sizes)
        parts = [self.case, self.optimizer, self.schedule, f"{self.num_stages}on{self.num_ranks}",
                 f"u{self.num_microbatches}", sizes]  # fmt: skip
        parts += ["split"] * self.split + [f"accumulate{self.accumulate}"] * (self.accumulate > 1)
        return " ".join([*parts, *filter(None, (self.again, self.backend))])

    def build(self) -> Trained:
        """The module, always with the same weights."""
        return ALL_CASES[self.case].build()

    def epochs(self, module: Trained) -> list[list[Any]]:
        """The batches."""
        return make_epochs(module, self.sizes)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """As ``configure_optimizers`` would: all parameters, also those that others hold."""
        return OPTIMIZERS[self.optimizer](module.parameters())


@dataclass
class Record:
    """What a training left behind, for comparison."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[State] = field(default_factory=list)
    weights: State = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)


def loss_of(result: Any) -> Tensor:
    """The loss in what a ``training_step`` returns."""
    loss: Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


def gradients_of(parameters: dict[str, nn.Parameter]) -> State:
    """A copy of the gradients that are there."""
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def state_of(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
) -> dict[str, dict[str, Any]]:
    """The optimizer's state, by the names of the parameters."""
    state = optimizer.state
    return {name: dict(state[p]) for name, p in parameters.items() if p in state}
