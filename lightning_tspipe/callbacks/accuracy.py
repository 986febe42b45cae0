"""Accuracy of classifications, counted by torchmetrics over all who share the samples."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_tspipe.callbacks.features import DataParallelGroup

_SCORES_AT_ONCE = 2**24
"""torchmetrics makes several tensors of the size of the scores."""


class Accuracies:
    """The shares of samples whose class is the first guess, and among the first five.

    Of classes with equal scores, as those that no neighbour has, the smaller one is guessed first.
    Labels that are none of the classes are never guessed. With fewer than five classes, all of them
    are among the first.

    Args:
        num_classes: Number of classes.
        device: Where scores are.
        group: Those among whom the samples are divided; None: nobody else.

    Example:
        >>> found = Accuracies(3)
        >>> found.update(torch.eye(3), torch.tensor([0, 1, 7]))
        >>> found.compute("knn")["knn_top1"] == found.compute("knn")["knn_top5"]
        True
    """

    def __init__(
        self,
        num_classes: int,
        device: torch.device | None = None,
        group: DataParallelGroup | None = None,
    ) -> None:
        self._num_classes = num_classes
        options: dict[str, Any] = {"average": "micro", "validate_args": False}
        # Ranks of a pipeline with other stages take no part: torchmetrics must not ask the world.
        options["distributed_available_fn"] = lambda: group is not None and group.size > 1
        if group is not None:
            options["dist_sync_fn"] = lambda value, **_: group.gather(value)
        self._metrics = MetricCollection(
            {
                name: MulticlassAccuracy(num_classes + 1, top_k=min(first, num_classes), **options)
                for name, first in (("top1", 1), ("top5", 5))
            },
            # These are found by equal states after the first update, where both may be right.
            compute_groups=False,
        ).to(device or torch.device("cpu"))

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Count samples.

        Args:
            scores: Class scores, (num_samples, num_classes).
            labels: Classes, (num_samples,).
        """
        is_known = (labels >= 0) & (labels < self._num_classes)
        labels = labels.where(is_known, self._num_classes)
        rows = max(1, _SCORES_AT_ONCE // (self._num_classes + 1))
        for some, own in zip(scores.split(rows), labels.split(rows), strict=True):
            # A class that nothing is taken for: that of all labels without one.
            self._metrics.update(pad(_places(some), (0, 1), value=-torch.inf), own)

    def compute(self, name: str) -> dict[str, float]:
        """``{name}_top1`` and ``{name}_top5`` as fractions; every member of the group calls it."""
        with warnings.catch_warnings():
            # A member may have got no samples.
            warnings.filterwarnings("ignore", ".*was called before the ``update`` method")
            found = self._metrics.compute()
        return {f"{name}_{key}": float(value) for key, value in found.items()}


def _places(scores: Tensor) -> Tensor:
    """Scores of the same order without ties, of which each device would make something else."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    falling = -torch.arange(scores.shape[1], dtype=torch.float, device=scores.device)
    return torch.empty_like(scores, dtype=torch.float).scatter_(1, order, falling.expand_as(order))
