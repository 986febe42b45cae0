"""Features of labelled images, computed by a submodule, through the pipeline if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_tspipe.callbacks.common import pipelined_of, submodules
from lightning_tspipe.callbacks.data_parallel import DataParallelGroup
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# Without [Any]: from a LightningCLI's config, objects are made for plain types only.
Source = DataLoader | Dataset | Iterable  # type: ignore[type-arg]
"""Labelled images: a loader or a dataset of ``(image, label, ...)``."""
Extractor = Callable[[Any, Tensor], Tensor]
Features = str | Extractor
"""Dotted name of the submodule whose output is the feature, or ``fn(pl_module, images)``.

For a part of a network, the network runs until that part has returned.
"""


def check_features(pl_module: LightningModule, features: Features) -> None:
    """Refuse the name of a submodule that does not exist.

    Raises:
        ConfigurationError: There is no such submodule.
    """
    if isinstance(features, str):
        submodules(pl_module, features, "features")


def feature_step(pl_module: nn.Module, features: Features) -> Callable[[Any], tuple[Any, Any]]:
    """The function that returns features and labels of a batch ``(images, labels, ...)``."""

    def step(batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise ConfigurationError(
                "labelled images must come in batches (images, labels, ...); this one is a "
                f"{type(batch).__name__}"
            )
        if isinstance(features, str):
            return _output_of(pl_module, features, batch[0]), batch[1]
        return features(pl_module, batch[0]), batch[1]

    return step


class _FoundError(BaseException):
    """Leaves a network once its feature is known; not caught by a user's ``except Exception``."""

    def __init__(self, feature: Tensor) -> None:
        super().__init__()
        self.feature = feature


def _output_of(pl_module: nn.Module, name: str, images: Tensor) -> Tensor:
    """The output of a submodule when the network that it belongs to runs on images."""
    network, inner = _network_of(pl_module, name), pl_module.get_submodule(name)
    if network is inner:
        feature: Tensor = network(images)
        return feature

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
        raise _FoundError(output)

    handle = inner.register_forward_hook(leave)
    try:
        network(images)
    except _FoundError as found:
        return found.feature
    finally:
        handle.remove()
    raise ConfigurationError(
        f"{name!r} is not called when the network that contains it runs on images"
    )


def _network_of(pl_module: nn.Module, name: str) -> nn.Module:
    """The outermost submodule on the path to ``name`` that can be called."""
    module = pl_module
    for part in name.split("."):
        module = module.get_submodule(part)
        if type(module).forward is not nn.Module.forward:
            break
    return module


def as_vectors(features: Tensor) -> Tensor:
    """Features, detached and flattened, in float32 or float64; shape (num_samples, dim)."""
    flat = features.detach().flatten(1)
    return flat if flat.dtype == torch.float64 else flat.float()


def hits_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Count correct classifications.

    Args:
        scores: Class scores, (num_samples, num_classes).
        labels: Classes, (num_samples,).

    Returns:
        Three integers: correct at the first guess, among the first five, and all samples.
    """
    hits = scores.argsort(dim=1, descending=True)[:, :5] == labels[:, None]
    return torch.stack(
        [hits[:, :1].sum(), hits.sum(), hits.new_tensor(len(labels), dtype=torch.long)]
    )


def accuracies(name: str, hits: Tensor) -> dict[str, float]:
    """``{name}_top1`` and ``{name}_top5`` as fractions, from what :func:`hits_of` counted."""
    top1, top5, total = hits.tolist()
    return {f"{name}_top1": top1 / max(total, 1), f"{name}_top5": top5 / max(total, 1)}


class LabelledFeatures:
    """Computes the features of labelled images, through the pipeline if there is one.

    Args:
        trainer: The trainer; its strategy may be a pipeline.
        pl_module: The module, in the mode in which the features are wanted.
        features: The features.
        group: The members that divide the batches among them.
        limit: Largest number of batches, of the whole group together.
        batch_size: For datasets; loaders have their own.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - who, what and how much
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        features: Features,
        group: DataParallelGroup,
        limit: int | None = None,
        batch_size: int = 256,
    ) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._features = features
        self._group = group
        self._limit = limit
        self._batch_size = batch_size

    def of(self, source: Source) -> tuple[Iterator[tuple[Tensor, Tensor] | None], int | None]:
        """Features and labels, batch by batch; None on ranks to which a pipeline sends none.

        Returns:
            The iterator over ``((num_samples, dim), (num_samples,))``, and how many items it has,
            if that is known.
        """
        loader, length = _share(source, self._batch_size, self._limit, self._group)
        return self._vectors(loader), length

    def _vectors(self, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor] | None]:
        for result in self._results(loader):
            if result is None:
                yield None
            else:
                vectors = as_vectors(result[0])
                yield vectors, torch.as_tensor(result[1]).to(vectors.device).flatten()

    def _results(self, loader: Iterable[Any]) -> Iterator[Any]:
        step = feature_step(self._module, self._features)
        pipelined, precision = pipelined_of(self._trainer), self._trainer.precision_plugin
        if pipelined is not None:
            yield from pipelined.evaluate(
                lambda batch: step(precision.convert_input(batch)), loader
            )
            return
        for batch in loader:
            moved = move_data_to_device(batch, self._module.device)
            with precision.forward_context():
                result = step(precision.convert_input(moved))
            yield result


class _Share:
    """Every n-th batch of a loader.

    Args:
        loader: The loader.
        group: The members that share the loader.
        limit: Where the loader ends for the whole group.
    """

    def __init__(self, loader: Iterable[Any], group: DataParallelGroup, limit: int | None) -> None:
        self._loader = loader
        self._group = group
        self._limit = limit

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self._group.rank, self._limit, self._group.size)


def _share(
    source: Source, batch_size: int, limit: int | None, group: DataParallelGroup
) -> tuple[Iterable[Any], int | None]:
    """This member's batches, and their number if it is known."""
    # A Dataset has no protocol that tells it from a loader, except that it is not iterable.
    if isinstance(source, Dataset):
        size = len(source)  # type: ignore[arg-type]
        starts = range(0, size, batch_size)[: limit if limit is not None else size]
        mine = starts[group.rank :: group.size]
        batches = [list(range(start, min(start + batch_size, size))) for start in mine]
        return DataLoader(source, batch_sampler=batches), len(batches)
    try:
        length: int | None = len(source)  # type: ignore[arg-type]
    except TypeError:
        length = limit
    if length is not None:
        length = length if limit is None else min(length, limit)
        length = len(range(group.rank, length, group.size))
    return _Share(source, group, limit), length


@contextmanager
def evaluating(pl_module: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; modes and random state are restored afterwards."""
    modes = {module: module.training for module in pl_module.modules()}
    try:
        with isolate_rng(), torch.no_grad():
            pl_module.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
