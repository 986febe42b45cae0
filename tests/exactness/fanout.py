"""Heads on a frozen trunk: the module that is trained, and each head trained alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as fn

from lightning_tspipe.heads import FanoutTraining, StudentFanout

WIDTH = 6
NUM_CLASSES = (3, 2, 4, 5, 2, 3)
"""Of each task; the labels are columns of the batch's second tensor."""

Batch = tuple[Tensor, Tensor]


def make_trunk() -> nn.Sequential:
    """Frozen, with BatchNorm in eval mode."""
    torch.manual_seed(5)
    layers: list[nn.Module] = []
    for index in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()][: 2 + index % 2]
    return nn.Sequential(*layers).requires_grad_(False).eval()


def make_head(index: int) -> nn.Sequential:
    """Heads of unequal depth; odd ones with BatchNorm."""
    torch.manual_seed(100 + index)
    hidden = [nn.Linear(WIDTH, 8), *([nn.BatchNorm1d(8)] if index % 2 else []), nn.ReLU()]
    return nn.Sequential(*(hidden if index % 3 else []), nn.LazyLinear(NUM_CLASSES[index]))


def make_heads(number: int) -> dict[str, nn.Module]:
    """By name; materialised."""
    heads: dict[str, nn.Module] = {}
    for index in range(number):
        head = make_head(index).eval()
        head(torch.zeros(2, WIDTH))
        heads[f"task{index}"] = head.train()
    return heads


def make_batches(sizes: Sequence[int] = (5, 5, 5, 3)) -> list[Batch]:
    """The last one is short."""
    generator = torch.Generator().manual_seed(9)
    return [
        (
            torch.randn(size, WIDTH, generator=generator, dtype=torch.float64),
            torch.stack([torch.randint(n, (size,), generator=generator) for n in NUM_CLASSES], 1),
        )
        for size in sizes
    ]


class Loader:
    """The same batches in each epoch."""

    def __init__(self, batches: Sequence[Batch] | None = None) -> None:
        self._batches = make_batches() if batches is None else list(batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One of another kind and rate for each head."""
    index = int(name.removeprefix("task"))
    if index % 2:
        return torch.optim.AdamW(parameters, lr=0.01 * (index + 1))
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def loss_of(name: str, output: Tensor, labels: Tensor) -> Tensor:
    """Of one head."""
    index = int(name.removeprefix("task"))
    smoothing = 0.1 if index == 2 else 0.0
    return fn.cross_entropy(output, labels[:, index], label_smoothing=smoothing)


class Tasks(FanoutTraining, LightningModule):
    """Written as for one head."""

    def __init__(self, num_heads: int, *, on_nan: Any = "raise") -> None:
        super().__init__()
        self.teacher = make_trunk()
        self.student = StudentFanout(make_heads(num_heads), on_nan=on_nan)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, labels = batch
        loss = loss_of(self.head, self.student(self.teacher(x)), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, labels = batch
        self.log("val_loss", loss_of(self.head, self.student(self.teacher(x)), labels))

    def head_optimizer(self, name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(name, parameters)


@torch.no_grad()
def _loss_now(name: str, trunk: nn.Module, head: nn.Module, batch: Batch) -> float:
    head.eval()
    loss = loss_of(name, head(trunk(batch[0])), batch[1])
    head.train()
    return float(loss)


def train_alone(  # noqa: PLR0913 - a whole training
    index: int,
    num_epochs: int = 2,
    batches: Sequence[Batch] | None = None,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    stops: Callable[[Callable[[Batch], float]], bool] = lambda _: False,
) -> tuple[dict[str, Tensor], list[float]]:
    """One head and its trunk, a plain loop.

    Args:
        index: The head.
        num_epochs: How long.
        batches: The same in each epoch.
        accumulate: Batches per update.
        clip: Norm of its gradients.
        stops: Whether its training ends after an epoch, given what tells the loss of a batch.

    Returns:
        Its state, and its loss in each step.
    """
    trunk = make_trunk().double()
    name = f"task{index}"
    head = make_heads(index + 1)[name].double()
    optimizer = make_optimizer(name, list(head.parameters()))
    losses = []
    for _ in range(num_epochs):
        all_batches = batches or make_batches()
        for number, (x, labels) in enumerate(all_batches):
            loss = loss_of(name, head(trunk(x)), labels)
            losses.append(float(loss.detach()))
            (loss / accumulate).backward()
            if (number + 1) % accumulate and number + 1 < len(all_batches):
                continue
            if clip is not None:
                nn.utils.clip_grad_norm_(head.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        if stops(partial(_loss_now, name, trunk, head)):
            break
    return dict(head.state_dict()), losses
