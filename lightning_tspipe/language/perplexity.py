"""Perplexity as a metric of torchmetrics, where no logits exist to compute it from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class Perplexity(Metric):
    """Perplexity of all tokens of an epoch: exp of their mean cross entropy.

    The mean of perplexities of batches is another number, and larger. torchmetrics' own
    ``Perplexity`` needs logits; this one takes a mean cross entropy, and of how many tokens it is.
    Before the first of them it is NaN. Like all metrics it is logged as an object,
    ``self.log("val_perplexity", self.val_perplexity)``, and added up over processes.

    Args:
        kwargs: For ``torchmetrics.Metric``.

    Example:
        >>> perplexity = Perplexity()
        >>> perplexity.update(torch.tensor(2.0), 3)  # 3 tokens, whose mean is 2
        >>> perplexity.update(torch.tensor(1.0), 1)
        >>> round(perplexity.compute().log().item(), 6)
        1.75
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    total: Tensor
    num_tokens: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Models that are built in 16 bits have metrics, too.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.add_state("total", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("num_tokens", torch.tensor(0), dist_reduce_fx="sum")

    @override
    def update(self, cross_entropy: Tensor, num_tokens: Tensor | int) -> None:
        """Add a batch.

        Args:
            cross_entropy: Its mean, a scalar, in nats; of no tokens it may be NaN.
            num_tokens: Of how many tokens, a scalar.
        """
        added = cross_entropy.to(self.total.dtype) * num_tokens
        number = torch.as_tensor(num_tokens, device=added.device)
        self.total += added.where(number > 0, 0)
        self.num_tokens += number

    @override
    def compute(self) -> Tensor:
        """The exponential of the mean over all tokens, a scalar."""
        return (self.total / self.num_tokens).exp()
