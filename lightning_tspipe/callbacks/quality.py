"""Quality of features while the network trains: k-NN accuracy, and an online linear probe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils import skip_init
from typing_extensions import override

from lightning_tspipe.callbacks.accuracy import Accuracies
from lightning_tspipe.callbacks.common import pipelined_of, submodules
from lightning_tspipe.callbacks.features import (
    DataParallelGroup,
    FeatureEvaluator,
    Features,
    Source,
    as_vectors,
    evaluating,
)
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.replacing import attributes_replaced

_SIMILARITIES_AT_ONCE = 2**24


class Neighbours:
    """The nearest vectors of a bank, found batch by batch, so that the bank is never held.

    Only the queries are held, with k similarities and labels for each.

    Args:
        queries: Normalised features, (num_queries, dim).
        k: How many neighbours each query may have.

    Attributes:
        values: Similarities of the nearest so far, the largest first, (num_queries, at most k).
        labels: Their classes, of the same shape.
        num_classes: One more than the largest label so far.
    """

    def __init__(self, queries: Tensor, k: int) -> None:
        self._queries = queries
        self._k = k
        self.values = queries.new_empty(len(queries), 0)
        self.labels = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        self.num_classes = 0

    def add(self, vectors: Tensor, labels: Tensor) -> None:
        """Compare the queries with a part of the bank.

        Args:
            vectors: Normalised features, (num_vectors, dim).
            labels: Their classes, (num_vectors,), integer.
        """
        if not len(labels):
            return
        self.num_classes = max(self.num_classes, int(labels.max()) + 1)
        rows = max(1, _SIMILARITIES_AT_ONCE // len(vectors))
        pieces = (each.split(rows) for each in (self._queries, self.values, self.labels))
        parts = []
        for queries, values, known in zip(*pieces, strict=True):
            similarities = torch.cat([values, queries @ vectors.T], dim=1)
            classes = torch.cat([known, labels.expand(len(known), -1)], dim=1)
            parts.append(self._nearest(similarities, classes))
        self.values, self.labels = map(torch.cat, zip(*parts, strict=True))

    def join(self, group: DataParallelGroup) -> None:
        """Keep the nearest of all that the members of a group found; the same on each of them."""
        gathered = group.gather((self.values, self.labels, self.num_classes))
        values, labels, numbers = zip(*gathered, strict=True)
        self.values, self.labels = self._nearest(torch.cat(values, 1), torch.cat(labels, 1))
        self.num_classes = max(numbers)

    def _nearest(self, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The largest similarities of each query, and their classes."""
        best = values.topk(min(self._k, values.shape[1]), dim=1)
        return best.values, labels.gather(1, best.indices)

    def scores(self, num_classes: int, temperature: float) -> Tensor:
        """Class scores of the weighted k-NN vote, up to a factor per query.

        Each of the k nearest votes for its label, with the weight exp(similarity / temperature).

        Source: Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance
        Discrimination", CVPR 2018, section 3.4.

        Args:
            num_classes: Number of classes.
            temperature: Softens (large) or sharpens (small) the weights.

        Returns:
            Shape (num_queries, num_classes).
        """
        # Only the ratios of a query's weights count: relative to the largest none can overflow.
        weights = ((self.values - self.values[:, :1]) / temperature).exp()
        scores = self.values.new_zeros(len(self.values), num_classes)
        return scores.scatter_add_(1, self.labels, weights)

    def accuracies(
        self, name: str, labels: Tensor, num_classes: int | None, temperature: float
    ) -> dict[str, float]:
        """``{name}_top1`` and ``{name}_top5`` of the vote, as fractions.

        Args:
            name: Part of the metrics' names.
            labels: The queries' classes, (num_queries,).
            num_classes: Number of classes; None: those of the bank.
            temperature: As for :meth:`scores`.
        """
        number = num_classes or self.num_classes
        found = Accuracies(number, labels.device)
        found.update(self.scores(number, temperature), labels)
        return found.compute(name)


@dataclass(eq=False, repr=False)
class KNNEvaluator(FeatureEvaluator):
    """Logs the weighted k-NN accuracy of the features at the end of training epochs.

    Features are flattened, taken in float32 (float64 stays) and normalised, so that the similarity
    is the cosine. Under a pipeline the pipeline computes them; its replicas, and the processes of
    DDP, divide the batches among them. Only the queries' features are held, not the bank's, so that
    a bank may be of any size. The module's train mode and the random state are restored afterwards.

    Args:
        bank: Labelled images that vote: a loader or a dataset of ``(image, label, ...)``.
        queries: Labelled images that are classified, in the same form.
        features: Dotted name of the submodule whose output is the feature, or
            ``fn(pl_module, images) -> features``. For a part of a network
            (``"student.layer3"``) the network runs up to it; a pipeline must know it as one of its
            submodules.
        k: Number of neighbours (at most the size of the bank).
        temperature: Temperature of the votes' weights.
        num_classes: Number of classes; None counts the bank's labels.
        every_n_epochs: Evaluate after each n-th epoch, and after the last one.
        batch_size: For datasets; loaders come with their own.
        limit: At most this many batches of each; None takes all.
        name: Metrics are logged as ``{name}_top1`` and ``{name}_top5``.

    Raises:
        ConfigurationError: An argument out of range, a missing submodule, an empty bank.
    """

    bank: Source
    queries: Source
    features: Features = "student"
    _: KW_ONLY
    k: int = 20
    temperature: float = 0.07
    num_classes: int | None = None
    every_n_epochs: int = 1
    batch_size: int = 256
    limit: int | None = None
    name: str = "val_knn"

    def __post_init__(self) -> None:
        if self.k < 1 or self.every_n_epochs < 1 or self.temperature <= 0:
            raise ConfigurationError(
                f"k={self.k} and every_n_epochs={self.every_n_epochs} must be at least 1, "
                f"temperature={self.temperature} above 0"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(self.features, str):
            submodules(pl_module, self.features, "features")  # fail now, not after an epoch

    @override
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Classify the queries now; every rank calls it.

        Returns:
            ``{name}_top1`` and ``{name}_top5`` as fractions; empty on a pipeline's ranks other
            than the loss rank.
        """
        group = DataParallelGroup(trainer)
        with evaluating(pl_module), group.buffers_of_first(pl_module):
            queries = list(_normalised(self.computed(trainer, pl_module, self.queries, "k-NN")))
            bank = self.computed(trainer, pl_module, self.bank, "k-NN")
            if not _has_features(trainer):
                for _ in bank:
                    """The loss rank compares; the others only compute."""
                return {}
            # Of all members, some of which may have none
            everything = [part for own in group.gather(queries) for part in own]
            if not everything:
                raise ConfigurationError("KNNEvaluator: the queries yield no batch")
            vectors, labels = map(torch.cat, zip(*everything, strict=True))
            neighbours = Neighbours(vectors, self.k)
            for part in _normalised(bank):
                neighbours.add(*part)
        neighbours.join(group)
        if not neighbours.num_classes:
            raise ConfigurationError("KNNEvaluator: the bank yields no batch")
        return neighbours.accuracies(self.name, labels, self.num_classes, self.temperature)


def _has_features(trainer: Trainer) -> bool:
    """Whether this rank gets features, since it computes losses."""
    pipelined = pipelined_of(trainer)
    return pipelined is None or pipelined.is_loss_rank


def _normalised(
    results: Iterator[tuple[Tensor, Tensor] | None],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised features and labels, where they arrive."""
    return ((normalize(found[0], dim=1), found[1]) for found in results if found is not None)


@dataclass(eq=False, repr=False)
class OnlineLinearProbe(FeatureEvaluator):
    """Trains a linear classifier on detached features while the module trains; logs its accuracy.

    The features are the output of a submodule in its first call of each ``training_step``; if they
    are those of several concatenated views, each view has the labels of the batch. The classifier
    does not affect the module, its optimizers or its random numbers. It starts from zero, takes one
    step of SGD per batch, and is saved and loaded with the callback. Under a pipeline it is on the
    loss rank; replicas and processes of DDP average its gradients.

    Logs ``train_{name}_loss`` at each step, and with ``queries`` ``val_{name}_top1`` and
    ``val_{name}_top5`` at the end of epochs.

    Args:
        num_classes: Number of classes.
        queries: Labelled images to classify at the end of epochs: a loader or a dataset of
            ``(image, label, ...)``; None: training only.
        features: Dotted name of the submodule. Under a pipeline one that is declared
            (``TSPipeStrategy(student=["backbone", "projection_head"])``).
        labels: ``fn(batch) -> labels`` of a training batch, shape (num_samples,); or the index of
            the labels in it.
        lr: Learning rate, for the mean loss over a batch.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        every_n_epochs: Classify the queries after each n-th epoch, and after the last one.
        batch_size: Batch size of queries that are a dataset.
        name: Part of the metrics' names.

    Raises:
        ConfigurationError: An argument out of range, a missing submodule, one that the step does
            not call, labels that do not belong to the features.
    """

    num_classes: int
    queries: Source | None = None
    features: str = "student"
    _: KW_ONLY
    labels: int | Callable[[Any], Tensor] = 1
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    every_n_epochs: int = 1
    batch_size: int = 256
    name: str = "probe"

    def __post_init__(self) -> None:
        if self.num_classes < 2 or self.every_n_epochs < 1 or self.lr <= 0:
            raise ConfigurationError(
                f"num_classes={self.num_classes} must be at least 2, "
                f"every_n_epochs={self.every_n_epochs} at least 1, lr={self.lr} above 0"
            )
        self.classifier: nn.Linear | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._restored: dict[str, Any] = {}
        self._kept: tuple[Tensor, Tensor] | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make ``training_step`` save features and labels too.

        They are read within the step, where a pipeline sees that they are needed and sends them to
        the loss rank.
        """
        watched = submodules(pl_module, self.features, "features")[self.features]
        step = pl_module.training_step

        @functools.wraps(step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            seen: list[Tensor] = []

            def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
                # While a pipeline infers shapes, tensors have no values.
                if not seen and not isinstance(output, FakeTensor):
                    seen.append(output)

            with watched.register_forward_hook(keep):
                result = step(batch, *args, **kwargs)
            if not seen:
                raise ConfigurationError(
                    f"OnlineLinearProbe: training_step does not call {self.features!r}, whose "
                    "output would be the features"
                )
            labels = self.labels(batch) if callable(self.labels) else batch[self.labels]
            if not isinstance(labels, Tensor):
                raise ConfigurationError(
                    f"OnlineLinearProbe: the labels are a {type(labels).__name__}, not a tensor; "
                    "pass labels=fn(batch)"
                )
            self._kept = seen[0].detach().clone(), labels.clone()
            return result

        replaced = [(pl_module, "training_step", training_step)]
        self.undo.enter_context(attributes_replaced(replaced))
        self.undo.callback(setattr, self, "_kept", None)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        kept, self._kept = self._kept, None
        if not (_has_features(trainer) and kept is not None):
            return
        loss = self._learn(trainer, *kept)
        pl_module.log(f"train_{self.name}_loss", loss, on_step=True, on_epoch=False, batch_size=1)

    @override
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Classify the queries now; every rank calls it.

        Returns:
            ``val_{name}_top1`` and ``val_{name}_top5`` as fractions; empty on a pipeline's ranks
            other than the loss rank, and before the first training batch.
        """
        assert self.queries is not None
        group = DataParallelGroup(trainer)
        found = Accuracies(self.num_classes, pl_module.device, group)
        with evaluating(pl_module), group.buffers_of_first(pl_module):
            for result in self.computed(trainer, pl_module, self.queries, "probe"):
                if result is not None and self.classifier is not None:
                    found.update(self.classifier(result[0]), result[1])
        if not _has_features(trainer) or self.classifier is None:
            return {}
        return found.compute(f"val_{self.name}")

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.classifier is None or self._optimizer is None:
            return self._restored
        return {
            "classifier": self.classifier.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
        self.classifier = self._optimizer = None

    def _learn(self, trainer: Trainer, features: Tensor, labels: Tensor) -> Tensor:
        """Take one step on a batch; returns the loss before it."""
        vectors, labels = as_vectors(features, labels)
        if len(vectors) % max(len(labels), 1):
            raise ConfigurationError(
                f"OnlineLinearProbe: {len(vectors)} features of {self.features!r}, but "
                f"{len(labels)} labels"
            )
        labels = labels.long().repeat(len(vectors) // len(labels))
        classifier, optimizer = self._classifier_for(vectors)
        with torch.enable_grad():
            loss = cross_entropy(classifier(vectors), labels)
            gradients = torch.autograd.grad(loss, list(classifier.parameters()))
        loss = loss.detach()
        if trainer.world_size > 1:
            loss, *gradients = (  # type: ignore[assignment]
                trainer.strategy.reduce(tensor, reduce_op="mean") for tensor in (loss, *gradients)
            )
        for parameter, gradient in zip(classifier.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def _classifier_for(self, vectors: Tensor) -> tuple[nn.Linear, torch.optim.Optimizer]:
        if self.classifier is None or self._optimizer is None:
            # Without random numbers
            self.classifier = skip_init(
                nn.Linear, vectors.shape[1], self.num_classes,
                dtype=vectors.dtype, device=vectors.device,
            )  # fmt: skip
            for parameter in self.classifier.parameters():
                nn.init.zeros_(parameter)
            self._optimizer = torch.optim.SGD(
                self.classifier.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay
            )
            if self._restored:
                self.classifier.load_state_dict(self._restored["classifier"])
                self._optimizer.load_state_dict(self._restored["optimizer"])
                self._restored = {}
        return self.classifier, self._optimizer
