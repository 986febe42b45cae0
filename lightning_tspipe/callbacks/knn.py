"""k-nearest-neighbour accuracy of the features: how good a representation is, without training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, pipelined_of, submodules
from lightning_tspipe.callbacks.progress import SideProgress
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Source = DataLoader[Any] | Dataset[Any] | Iterable[Any]
Extractor = Callable[["LightningModule", Tensor], Tensor]


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
        chunk_size: Bank vectors compared at a time; bounds the memory to
            num_queries * chunk_size similarities.

    Returns:
        Scores up to a factor per query, (num_queries, num_classes).
    """
    values = queries.new_empty(len(queries), 0)
    indices = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    for start in range(0, len(bank), chunk_size):
        similarity = queries @ bank[start : start + chunk_size].T
        nearest = similarity.topk(min(k, similarity.shape[1]), dim=1)
        values = torch.cat([values, nearest.values], dim=1)
        indices = torch.cat([indices, nearest.indices + start], dim=1)
        values, best = values.topk(min(k, values.shape[1]), dim=1)
        indices = indices.gather(1, best)
    # Only the ratios of a query's weights count: relative to the largest none can overflow.
    weights = ((values - values[:, :1]) / temperature).exp()
    scores = queries.new_zeros(len(queries), num_classes)
    return scores.scatter_add_(1, labels[indices], weights)


class KNNEvaluator(Callback):
    """Logs the weighted k-NN accuracy of the features at the end of training epochs.

    Features are flattened, taken in float32 and normalised. Under a pipeline they are computed by
    the pipeline; under DDP global rank 0 computes them and tells the others the result.
    The module's train mode and the random state are as before afterwards.

    Args:
        bank: Labelled images that vote: a loader or a dataset of ``(image, label, ...)``.
        queries: Labelled images that are classified, in the same form.
        features: Dotted name of the submodule whose output is the feature, or
            ``fn(pl_module, images) -> features``.
        k: Number of neighbours (at most the size of the bank).
        temperature: Of the votes' weights.
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
        features: str | Extractor = "student",
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
        self.bank = _as_loader(bank, batch_size)
        self.queries = _as_loader(queries, batch_size)
        self.features = features
        self.k = k
        self.temperature = temperature
        self.num_classes = num_classes
        self.every_n_epochs = every_n_epochs
        self.limit = limit
        self.name = name
        self._progress = SideProgress("k-NN")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(self.features, str):  # a wrong name shows now, not after an epoch
            submodules(pl_module, self.features, "features")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        if epoch % self.every_n_epochs and epoch != trainer.max_epochs:
            return
        metrics = self.evaluate(trainer, pl_module)
        if metrics:
            # Ranks of DDP agree already; of a pipeline only one logs, and must not wait for others.
            pl_module.log_dict(
                metrics,
                prog_bar=True,
                batch_size=1,
                sync_dist=True,
                rank_zero_only=pipelined_of(trainer) is not None,
            )

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Classify the queries now; every rank calls it.

        Returns:
            ``{name}_top1`` and ``{name}_top5`` as fractions; empty on a pipeline's ranks other
            than the loss rank.
        """
        pipelined = pipelined_of(trainer)
        if pipelined is not None:
            metrics = self._evaluate(trainer, pl_module)
            return metrics if pipelined.is_loss_rank else {}
        metrics = self._evaluate(trainer, pl_module) if trainer.is_global_zero else {}
        return trainer.strategy.broadcast(metrics)

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        with _inference(pl_module):
            bank = list(self._features(trainer, pl_module, self.bank))
            vote = self._vote_of(bank) if bank else None
            counts = torch.zeros(3, dtype=torch.long)
            for features, labels in self._features(trainer, pl_module, self.queries):
                if vote is None:
                    raise ConfigurationError("KNNEvaluator: the bank yields no batch")
                counts += _count_hits(vote(features), labels)
        top1, top5, total = counts.tolist()
        total = max(total, 1)
        return {f"{self.name}_top1": top1 / total, f"{self.name}_top5": top5 / total}

    def _features(
        self, trainer: Trainer, pl_module: LightningModule, loader: Iterable[Any]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised features and labels, batch by batch, where they arrive."""
        for result in self._progress.track(
            trainer, self._results(trainer, pl_module, loader), _length(loader, self.limit)
        ):
            if result is not None:
                features, labels = result
                features = normalize(features.detach().flatten(1).float(), dim=1)
                yield features, labels.to(features.device).flatten()

    def _results(
        self, trainer: Trainer, pl_module: LightningModule, loader: Iterable[Any]
    ) -> Iterator[Any]:
        extract = self.features
        if isinstance(extract, str):
            module = pl_module.get_submodule(extract)

            def call(batch: Any) -> tuple[Tensor, Tensor]:
                return module(batch[0]), batch[1]
        else:

            def call(batch: Any) -> tuple[Tensor, Tensor]:
                return extract(pl_module, batch[0]), batch[1]

        pipelined = pipelined_of(trainer)
        if pipelined is not None:
            yield from pipelined.evaluate(call, loader, limit=self.limit)
            return
        precision = trainer.precision_plugin
        for batch in islice(loader, self.limit):
            moved = move_data_to_device(batch, pl_module.device)
            with precision.forward_context():
                result = call(precision.convert_input(moved))
            yield result

    def _vote_of(self, bank: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
        vectors = torch.cat([features for features, _ in bank])
        labels = torch.cat([labels for _, labels in bank])
        num_classes = self.num_classes or int(labels.max()) + 1
        bank.clear()

        def vote(queries: Tensor) -> Tensor:
            return knn_scores(
                queries, vectors, labels, num_classes, k=self.k, temperature=self.temperature
            )

        return vote


def _count_hits(scores: Tensor, labels: Tensor) -> Tensor:
    """(correct at the first guess, among the first five, all), as integers."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices
    hits = best == labels[:, None]
    return torch.tensor([int(hits[:, 0].sum()), int(hits.sum()), len(labels)])


def _as_loader(source: Source, batch_size: int) -> Iterable[Any]:
    # A Dataset has no protocol that tells it from a loader, except that it is not iterable.
    if isinstance(source, Dataset):
        return DataLoader(source, batch_size=batch_size)
    return source


def _length(loader: Iterable[Any], limit: int | None) -> int | None:
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:
        return limit
    return length if limit is None else min(length, limit)


@contextmanager
def _inference(pl_module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes and random state come back afterwards."""
    modes = {module: module.training for module in pl_module.modules()}
    try:
        with isolate_rng(), torch.no_grad():
            pl_module.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
