"""k-nearest-neighbour accuracy of features: the quality of a representation without training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, log_at_epoch_end, pipelined_of
from lightning_tspipe.callbacks.data_parallel import DataParallelGroup
from lightning_tspipe.callbacks.features import (
    Features,
    LabelledFeatures,
    Source,
    accuracies,
    check_features,
    evaluating,
    hits_of,
)
from lightning_tspipe.callbacks.progress import SideProgress
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

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
        parts = []
        for start in range(0, len(self._queries), rows):
            part = slice(start, start + rows)
            similarity = self._queries[part] @ vectors.T
            parts.append(self._merged(part, similarity, labels.expand(len(similarity), -1)))
        self._keep(parts)

    def joined(self, group: DataParallelGroup) -> Neighbours:
        """The nearest of all that the members of a group found; the same on each of them."""
        missing = (0, self._k - self.values.shape[1])
        values = group.gather(pad(self.values, missing, value=-torch.inf))
        labels = group.gather(pad(self.labels, missing))
        found = Neighbours(self._queries, self._k)
        for part in zip(values, labels, strict=True):
            found._keep([found._merged(slice(None), *part)])
        num_classes = group.gather(torch.tensor([self.num_classes], device=self.labels.device))
        found.num_classes = int(torch.cat(num_classes).max())
        return found

    def _merged(self, part: slice, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.cat([self.values[part], values], dim=1)
        labels = torch.cat([self.labels[part], labels], dim=1)
        best = values.topk(min(self._k, values.shape[1]), dim=1)
        return best.values, labels.gather(1, best.indices)

    def _keep(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        if parts:
            self.values = torch.cat([values for values, _ in parts])
            self.labels = torch.cat([labels for _, labels in parts])

    def scores(self, num_classes: int, temperature: float) -> Tensor:
        """The votes, up to a factor per query, (num_queries, num_classes)."""
        # Only the ratios of a query's weights count: relative to the largest none can overflow.
        weights = ((self.values - self.values[:, :1]) / temperature).exp()
        scores = self.values.new_zeros(len(self.values), num_classes)
        return scores.scatter_add_(1, self.labels, weights)


def knn_scores(  # noqa: PLR0913 - data, then settings by keyword
    queries: Tensor,
    bank: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    k: int = 20,
    temperature: float = 0.07,
    chunk_size: int = 65536,
) -> Tensor:
    """Class scores of the weighted k-NN vote.

    Each of the k nearest bank vectors votes for its label, with the weight
    exp(similarity / temperature).

    Source: Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination",
    CVPR 2018, section 3.4.

    Args:
        queries: Normalised features, (num_queries, dim).
        bank: Normalised features, (num_bank, dim).
        labels: Class of each bank vector, (num_bank,), integer.
        num_classes: Number of classes.
        k: Number of neighbours; at most the whole bank votes.
        temperature: Softens (large) or sharpens (small) the weights.
        chunk_size: Number of bank vectors compared at a time.

    Returns:
        Scores up to a factor per query, (num_queries, num_classes).
    """
    neighbours = Neighbours(queries, k)
    for start in range(0, len(bank), chunk_size):
        part = slice(start, start + chunk_size)
        neighbours.add(bank[part], labels[part])
    return neighbours.scores(num_classes, temperature)


class KNNEvaluator(Callback):
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

    def __init__(  # noqa: PLR0913 - two data sources, then settings by keyword
        self,
        bank: Source,
        queries: Source,
        features: Features = "student",
        *,
        k: int = 20,
        temperature: float = 0.07,
        num_classes: int | None = None,
        every_n_epochs: int = 1,
        batch_size: int = 256,
        limit: int | None = None,
        name: str = "val_knn",
    ) -> None:
        if k < 1 or every_n_epochs < 1 or temperature <= 0:
            raise ConfigurationError(
                f"k={k} and every_n_epochs={every_n_epochs} must be at least 1, "
                f"temperature={temperature} above 0"
            )
        self.bank = bank
        self.queries = queries
        self.features = features
        self.k = k
        self.temperature = temperature
        self.num_classes = num_classes
        self.every_n_epochs = every_n_epochs
        self.batch_size = batch_size
        self.limit = limit
        self.name = name
        self._progress = SideProgress("k-NN")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_features(pl_module, self.features)  # fail now, not after an epoch

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        if epoch % self.every_n_epochs and epoch != trainer.max_epochs:
            return
        log_at_epoch_end(trainer, pl_module, self.evaluate(trainer, pl_module))

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Classify the queries now; every rank calls it.

        Returns:
            ``{name}_top1`` and ``{name}_top5`` as fractions; empty on a pipeline's ranks other
            than the loss rank.
        """
        group, pipelined = DataParallelGroup(trainer), pipelined_of(trainer)
        images = LabelledFeatures(
            trainer, pl_module, self.features, group, self.limit, self.batch_size
        )
        with evaluating(pl_module), group.buffers_of_first(pl_module):
            queries = list(self._vectors(trainer, images, self.queries))
            if pipelined is not None and not pipelined.is_loss_rank:
                for _ in self._vectors(trainer, images, self.bank):
                    """The loss rank compares; the others only compute."""
                return {}
            device = pl_module.device
            vectors = _gathered([v for v, _ in queries], torch.empty(0, 0, device=device), group)
            labels = _gathered(
                [labels for _, labels in queries],
                torch.empty(0, dtype=torch.long, device=device),
                group,
            )
            neighbours = Neighbours(vectors, self.k)
            for part in self._vectors(trainer, images, self.bank):
                neighbours.add(*part)
        return self._accuracy(neighbours.joined(group), labels)

    def _accuracy(self, neighbours: Neighbours, labels: Tensor) -> dict[str, float]:
        if not neighbours.num_classes:
            raise ConfigurationError("KNNEvaluator: the bank yields no batch")
        scores = neighbours.scores(self.num_classes or neighbours.num_classes, self.temperature)
        return accuracies(self.name, hits_of(scores, labels))

    def _vectors(
        self, trainer: Trainer, images: LabelledFeatures, source: Source
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised features and labels, batch by batch, where they arrive."""
        results, length = images.of(source)
        for result in self._progress.track(trainer, results, length):
            if result is not None:
                yield normalize(result[0], dim=1), result[1]


def _gathered(parts: list[Tensor], nothing: Tensor, group: DataParallelGroup) -> Tensor:
    """The parts of all members, concatenated."""
    return torch.cat(group.gather(torch.cat(parts) if parts else nothing))
