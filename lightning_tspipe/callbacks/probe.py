"""An online linear probe: a classifier trained on detached features."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy
from typing_extensions import override

from lightning_tspipe.callbacks.common import (
    Restoring,
    log_at_epoch_end,
    may_log,
    pipelined_of,
    replaced,
    submodules,
)
from lightning_tspipe.callbacks.data_parallel import DataParallelGroup
from lightning_tspipe.callbacks.features import (
    LabelledFeatures,
    Source,
    accuracies,
    as_vectors,
    evaluating,
    hits_of,
)
from lightning_tspipe.callbacks.progress import SideProgress
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class OnlineLinearProbe(Restoring):
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

    def __init__(  # noqa: PLR0913 - the task, then settings by keyword
        self,
        num_classes: int,
        queries: Source | None = None,
        features: str = "student",
        *,
        labels: int | Callable[[Any], Tensor] = 1,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        every_n_epochs: int = 1,
        batch_size: int = 256,
        name: str = "probe",
    ) -> None:
        if num_classes < 2 or every_n_epochs < 1 or lr <= 0:
            raise ConfigurationError(
                f"num_classes={num_classes} must be at least 2, every_n_epochs={every_n_epochs} at "
                f"least 1, lr={lr} above 0"
            )
        super().__init__()
        self.num_classes = num_classes
        self.queries = queries
        self.features = features
        self.labels = labels
        self.every_n_epochs = every_n_epochs
        self.batch_size = batch_size
        self.name = name
        self.classifier: nn.Linear | None = None
        self._settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self._optimizer: torch.optim.Optimizer | None = None
        self._restored: dict[str, Any] = {}
        self._kept: tuple[Tensor, Tensor] | None = None
        self._progress = SideProgress("probe")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch(pl_module, submodules(pl_module, self.features, "features")[self.features])

    @override
    def restore(self) -> None:
        super().restore()
        self._kept = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        kept, self._kept = self._kept, None
        if not (self._is_here(trainer) and kept is not None):
            return
        loss = self._learn(trainer, *kept)
        pl_module.log(f"train_{self.name}_loss", loss, on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        if self.queries is None or (epoch % self.every_n_epochs and epoch != trainer.max_epochs):
            return
        log_at_epoch_end(trainer, pl_module, self.evaluate(trainer, pl_module))

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Classify the queries now; every rank calls it.

        Returns:
            ``val_{name}_top1`` and ``val_{name}_top5`` as fractions; empty on a pipeline's ranks
            other than the loss rank, and before the first training batch.
        """
        assert self.queries is not None
        group = DataParallelGroup(trainer)
        images = LabelledFeatures(
            trainer, pl_module, self.features, group, batch_size=self.batch_size
        )
        hits = torch.zeros(3, dtype=torch.long, device=pl_module.device)
        with evaluating(pl_module), group.buffers_of_first(pl_module):
            results, length = images.of(self.queries)
            for result in self._progress.track(trainer, results, length):
                if result is not None and self.classifier is not None:
                    hits += hits_of(self.classifier(result[0]), result[1])
        if not self._is_here(trainer) or self.classifier is None:
            return {}
        return accuracies(f"val_{self.name}", torch.stack(group.gather(hits)).sum(dim=0))

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

    @staticmethod
    def _is_here(trainer: Trainer) -> bool:
        """Whether this rank has features, since it computes losses."""
        return pipelined_of(trainer) is None or may_log(trainer)

    def _watch(self, pl_module: LightningModule, watched: nn.Module) -> None:
        """Make ``training_step`` save features and labels too.

        They are read within the step, where a pipeline sees that they are needed and sends them to
        the loss rank.
        """
        step = pl_module.training_step

        @functools.wraps(step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            seen: list[Tensor] = []

            def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
                # While a pipeline infers shapes, tensors have no values.
                if not seen and not isinstance(output, FakeTensor):
                    seen.append(output)

            handle = watched.register_forward_hook(keep)
            try:
                result = step(batch, *args, **kwargs)
            finally:
                handle.remove()
            if not seen:
                raise ConfigurationError(
                    f"OnlineLinearProbe: training_step does not call {self.features!r}, whose "
                    "output would be the features"
                )
            self._kept = seen[0].detach().clone(), self._labels_of(batch).clone()
            return result

        self.undo.append(replaced(pl_module, "training_step", training_step))

    def _labels_of(self, batch: Any) -> Tensor:
        labels = self.labels(batch) if callable(self.labels) else batch[self.labels]
        if not isinstance(labels, Tensor):
            raise ConfigurationError(
                f"OnlineLinearProbe: the labels are a {type(labels).__name__}, not a tensor; pass "
                "labels=fn(batch)"
            )
        return labels

    def _learn(self, trainer: Trainer, features: Tensor, labels: Tensor) -> Tensor:
        """Take one step on a batch; returns the loss before it."""
        vectors, labels = as_vectors(features), labels.flatten().long()
        if len(vectors) % max(len(labels), 1):
            raise ConfigurationError(
                f"OnlineLinearProbe: {len(vectors)} features of {self.features!r}, but "
                f"{len(labels)} labels"
            )
        labels = labels.to(vectors.device).repeat(len(vectors) // len(labels))
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
            with torch.device("meta"):  # draws no random numbers
                classifier = nn.Linear(vectors.shape[1], self.num_classes, dtype=vectors.dtype)
            classifier = classifier.to_empty(device=vectors.device)
            for parameter in classifier.parameters():
                nn.init.zeros_(parameter)
            self._optimizer = torch.optim.SGD(classifier.parameters(), **self._settings)  # type: ignore[arg-type]
            if self._restored:
                classifier.load_state_dict(self._restored["classifier"])
                self._optimizer.load_state_dict(self._restored["optimizer"])
                self._restored = {}
            self.classifier = classifier
        return self.classifier, self._optimizer
