"""Backwards that run right behind the forwards of their blocks.

Blocks have nothing in common, so that a block's activations can go before the next block runs: a
rank holds those of one block at a time. Gradients are zeroed between the step and its backward, as
Lightning has it; until then they lie aside::

    training_step   F0 B0 | F1 B1 | F2 B2     gradients lie aside
    zero_grad
    backward        of what stands for the losses; then gradients come to their parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_tspipe.replacing import attributes_replaced


class EarlyBackwards:
    """Runs backwards before their time.

    Args:
        parameters: All that a loss may reach.

    Attributes:
        factor: By what the losses will be multiplied before their backward, as far as is known:
            small gradients would be lost without it where they have few bits.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if not p.is_meta]
        self.factor: Callable[[], float | Tensor] = lambda: 1.0
        self._aside: list[tuple[Tensor, float | Tensor, list[tuple[nn.Parameter, Tensor]]]] = []
        """What stands for a loss, by what this was multiplied, and what its backward gave."""

    def run(self, loss: Tensor) -> Tensor:
        """The backward of a loss.

        Returns:
            What stands for the loss: its value, which wants a gradient and holds no graph.
        """
        factor, gradients = self.factor(), []
        if loss.requires_grad:
            with attributes_replaced((p, "grad", None) for p in self._parameters):
                (loss * factor).backward()
                gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        stand_in = loss.detach().requires_grad_()
        self._aside.append((stand_in, factor, gradients))
        return stand_in

    @torch.no_grad()
    def settle(self) -> None:
        """After the backward of what stands for the losses: gradients come to their parameters."""
        aside, self._aside = self._aside, []
        for stand_in, factor, gradients in aside:
            wanted = stand_in.grad
            if wanted is None:  # this loss takes no part
                continue
            if gradients:
                torch._foreach_mul_([g for _, g in gradients], wanted / factor)
            for parameter, gradient in gradients:
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
