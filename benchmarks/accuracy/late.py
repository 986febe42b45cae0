"""The ablation "without asymmetric update": gradients one update late (TSPipe, equation 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override


class LateGradients(Callback):
    """theta_n = optimizer(theta_{n-1}, gradient of the loss at (theta_{n-2}, xi_{n-2})).

    Forward and backward of batch n run with the student and the teacher of one update earlier; the
    optimizer and the teacher's average apply to the newest. Buffers are always the newest. The
    first batch has nothing older. For one device, automatic optimization, one batch per update, and
    a teacher that is averaged after the optimizer step (``MomentumEMA``).

    Source: Lim et al., "TSPipe", ICML 2022, equation 3 and table 3.
    """

    def __init__(self) -> None:
        self._older: list[Tensor] = []
        self._newest: list[Tensor] = []

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._newest = [parameter.detach().clone() for parameter in _parameters(pl_module)]
        if self._older:
            _write(pl_module, self._older)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        _write(pl_module, self._newest)
        self._older = self._newest


def _parameters(module: LightningModule) -> Iterator[Tensor]:
    """Of the student and of the teacher."""
    yield from module.get_submodule("student").parameters()
    yield from module.get_submodule("teacher").parameters()


@torch.no_grad()
def _write(module: LightningModule, values: list[Tensor]) -> None:
    for parameter, value in zip(_parameters(module), values, strict=True):
        parameter.copy_(value)
