"""Evaluation of frozen features after training: k-NN and linear classification."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, Dataset

from lightning_tspipe.callbacks.accuracy import Accuracies
from lightning_tspipe.callbacks.features import (
    Features,
    Source,
    as_vectors,
    evaluating,
    feature_step,
)
from lightning_tspipe.callbacks.quality import Neighbours
from lightning_tspipe.errors import ConfigurationError

__all__ = ["knn_evaluation", "linear_evaluation"]


def linear_evaluation(  # noqa: PLR0913 - the task, then settings by keyword
    module: nn.Module,
    train: Source,
    validation: Source,
    features: Features = "student",
    *,
    num_classes: int | None = None,
    epochs: int = 90,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    batch_size: int = 256,
    on_epoch: Callable[[int, float], None] | None = None,
) -> dict[str, float]:
    """Train a linear classifier on frozen features, and classify with it.

    The usual protocol, as in lightly's benchmarks: SGD with momentum, no weight decay, a learning
    rate of ``lr * batch_size / 256`` that falls to zero on a cosine, epoch by epoch. The features
    are computed in each epoch, so that ``train`` may augment. Everything runs on the module's
    device. The module does not change.

    Args:
        module: A LightningModule, or any module.
        train: Labelled images: a loader, or a dataset (then in random order).
        validation: Labelled images that are classified.
        features: Dotted name of the submodule whose output is the feature, or
            ``fn(module, images) -> features``.
        num_classes: Number of classes; None: one more than the largest label of ``train``, found in
            an additional pass.
        epochs: Passes over ``train``.
        lr: Learning rate for 256 samples per batch.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        batch_size: For datasets; loaders have their own.
        on_epoch: Called with the epoch, from 0, and its mean loss.

    Returns:
        ``linear_top1`` and ``linear_top5`` as fractions.

    Raises:
        ConfigurationError: There is no batch to train on, or batches are not ``(images, labels)``.
    """
    with evaluating(module):
        training = partial(_images, module, train, features, batch_size, shuffle=True)
        if num_classes is None:
            num_classes = 1 + max((int(labels.max()) for _, labels in training()), default=-1)
        classifier: nn.Linear | None = None
        optimizer: torch.optim.Optimizer | None = None
        rate = lr
        for epoch in range(epochs):
            falling = (1 + math.cos(math.pi * epoch / epochs)) / 2
            losses = []
            for vectors, labels in training():
                if classifier is None or optimizer is None:
                    rate = lr * len(vectors) / 256
                    classifier = nn.Linear(vectors.shape[1], num_classes).to(vectors)
                    optimizer = torch.optim.SGD(
                        classifier.parameters(), rate, momentum=momentum, weight_decay=weight_decay
                    )
                optimizer.param_groups[0]["lr"] = rate * falling
                with torch.enable_grad():
                    loss = cross_entropy(classifier(vectors), labels)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            if on_epoch is not None and losses:
                on_epoch(epoch, torch.stack(losses).mean().item())
        if classifier is None:
            raise ConfigurationError("linear_evaluation: there is nothing to train on")
        found = Accuracies(num_classes, classifier.weight.device)
        for vectors, labels in _images(module, validation, features, batch_size):
            found.update(classifier(vectors), labels)
        return found.compute("linear")


def knn_evaluation(  # noqa: PLR0913 - the task, then settings by keyword
    module: nn.Module,
    bank: Source,
    queries: Source,
    features: Features = "student",
    *,
    k: int = 20,
    temperature: float = 0.07,
    num_classes: int | None = None,
    batch_size: int = 256,
) -> dict[str, float]:
    """Classify by weighted k-NN, as :class:`~lightning_tspipe.KNNEvaluator` does in training.

    Args:
        module: A LightningModule, or any module.
        bank: Labelled images that vote: a loader or a dataset.
        queries: Labelled images that are classified.
        features: As in :func:`linear_evaluation`.
        k: Number of neighbours.
        temperature: Temperature of the votes' weights.
        num_classes: Number of classes; None counts the bank's labels.
        batch_size: For datasets; loaders have their own.

    Returns:
        ``knn_top1`` and ``knn_top5`` as fractions.

    Raises:
        ConfigurationError: The bank or the queries are empty, or not ``(images, labels)``.
    """
    with evaluating(module):
        asked = list(_images(module, queries, features, batch_size))
        if not asked:
            raise ConfigurationError("knn_evaluation: there are no queries")
        neighbours = Neighbours(normalize(torch.cat([v for v, _ in asked]), dim=1), k)
        for vectors, labels in _images(module, bank, features, batch_size):
            neighbours.add(normalize(vectors, dim=1), labels)
        if not neighbours.num_classes:
            raise ConfigurationError("knn_evaluation: the bank is empty")
        asked_for = torch.cat([labels for _, labels in asked])
        return neighbours.accuracies("knn", asked_for, num_classes, temperature)


def _images(
    module: nn.Module, source: Source, features: Features, batch_size: int, *, shuffle: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels, batch by batch."""
    loader: Any = source
    if isinstance(source, Dataset):
        loader = DataLoader(source, batch_size, shuffle=shuffle)
    step = feature_step(module, features)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    for batch in loader:
        yield as_vectors(*step(move_data_to_device(batch, device)))
