"""Features of labelled images, computed by a submodule, through the pipeline if there is one."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset
from typing_extensions import override

from lightning_tspipe.callbacks import common
from lightning_tspipe.callbacks.common import Restoring
from lightning_tspipe.callbacks.pictures import log_picture
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plots import draw_curves, timed_curves
from lightning_tspipe.replacing import attributes_replaced

T = TypeVar("T")

# Without [Any]: from a LightningCLI's config, objects are made for plain types only.
Source = DataLoader | Dataset | Iterable  # type: ignore[type-arg]
"""Labelled images: a loader or a dataset of ``(image, label, ...)``."""
Extractor = Callable[[Any, Tensor], Tensor]
Features = str | Extractor
"""Dotted name of the submodule whose output is the feature, or ``fn(pl_module, images)``.

For a part of a network, the network runs until that part has returned.
"""


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
    network, inner = pl_module, pl_module.get_submodule(name)
    for part in name.split("."):
        network = network.get_submodule(part)
        if type(network).forward is not nn.Module.forward:
            break  # the outermost one on the path that can be called
    if network is inner:
        feature: Tensor = network(images)
        return feature

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
        raise _FoundError(output)

    try:
        with inner.register_forward_hook(leave):
            network(images)
    except _FoundError as found:
        return found.feature
    raise ConfigurationError(
        f"{name!r} is not called when the network that contains it runs on images"
    )


def as_vectors(features: Tensor, labels: Any) -> tuple[Tensor, Tensor]:
    """Features, detached and flattened, in float32 or float64, and labels on the same device.

    Returns:
        Shapes (num_samples, dim) and (num_labels,).
    """
    flat = features.detach().flatten(1)
    vectors = flat if flat.dtype == torch.float64 else flat.float()
    return vectors, torch.as_tensor(labels).to(vectors.device).flatten()


class DataParallelGroup:
    """The members that do the same work on different samples, as seen by one of them.

    A strategy that shards a module over its processes (FSDP) needs all of them for each batch:
    there the group has one member, and every process does everything.

    Args:
        trainer: The trainer, whose strategy decides.

    Attributes:
        rank: Rank of this member.
        size: Number of members.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._pipelined = common.pipelined_of(trainer)
        self.rank, self.size = 0, 1
        if self._pipelined is not None:
            self.rank, self.size = self._pipelined.replica, self._pipelined.data_parallel_size
        elif common.derives_from(trainer, "DDPStrategy"):
            self.rank, self.size = trainer.global_rank, trainer.world_size

    def gather(self, value: T) -> list[T]:
        """The values of all members, on each of them: tensors, or structures that hold some."""
        if self.size == 1:
            return [value]
        on_host = move_data_to_device(value, torch.device("cpu"))
        if self._pipelined is not None:
            found = self._pipelined.of_replicas(on_host)
        else:
            strategy = self._trainer.strategy
            found = [strategy.broadcast(on_host, rank) for rank in range(self.size)]
        gathered: list[T] = move_data_to_device(found, self._trainer.strategy.root_device)
        return gathered

    @contextmanager
    def buffers_of_first(self, module: nn.Module) -> Iterator[None]:
        """Give all members the buffers of the first one, for as long as the context lasts.

        BatchNorm statistics differ between members. With this, features come from one network: the
        one that is saved.
        """
        if self.size == 1:
            yield
            return
        buffers = [buffer for buffer in module.buffers() if not buffer.is_meta]
        before = [buffer.clone() for buffer in buffers]
        try:
            _fill(buffers, self.gather(before)[0])
            yield
        finally:
            _fill(buffers, before)


@torch.no_grad()
def _fill(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


class FeatureEvaluator(Restoring, ABC):
    """Classifies labelled images by their features, at the end of training epochs.

    When training ends, loggers that take pictures get the curve, as ``{name}_curve``.

    Attributes:
        queries: Labelled images that are classified; None: none.
        features: The features.
        every_n_epochs: Evaluate after each n-th epoch, and after the last one.
        batch_size: For datasets; loaders have their own.
        limit: Largest number of batches of a source, of all members together.
        name: Part of the metrics' names.
    """

    queries: Source | None
    features: Features
    every_n_epochs: int
    batch_size: int
    limit: int | None = None
    name: str
    _found: tuple[tuple[int, dict[str, float]], ...] = ()  # in this fit: steps, and accuracies

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        is_due = epoch % self.every_n_epochs == 0 or epoch == trainer.max_epochs
        if is_due and self.queries is not None:
            accuracies = self.evaluate(trainer, pl_module)
            common.log_at_epoch_end(trainer, pl_module, accuracies)
            self._found = (*self._found, (trainer.global_step, accuracies))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._log_curve(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        super().on_exception(trainer, pl_module)
        self._log_curve(trainer)

    def _log_curve(self, trainer: Trainer) -> None:
        """The accuracies of this fit as a picture, once."""
        found, self._found = self._found, ()
        points = {
            metric: [(step, values[metric]) for step, values in found if metric in values]
            for metric in dict.fromkeys(name for _, values in found for name in values)
        }
        if points:  # on the loss rank of a pipeline
            curves = timed_curves(points, ())
            log_picture(trainer, f"{self.name}_curve", lambda: draw_curves({self.name: curves}))

    @abstractmethod
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Classify the queries now; every rank calls it."""

    def computed(
        self, trainer: Trainer, pl_module: LightningModule, source: Source, description: str
    ) -> Iterator[tuple[Tensor, Tensor] | None]:
        """This member's features and labels, through the pipeline if there is one.

        Args:
            trainer: The trainer; its strategy may be a pipeline.
            pl_module: The module, in the mode in which the features are wanted.
            source: The images.
            description: What a progress bar says.

        Returns:
            An iterator over ``((num_samples, dim), (num_samples,))``, batch by batch; None on ranks
            to which a pipeline sends none.
        """
        loader, length = self._share(trainer, source)
        precision, pipelined = trainer.precision_plugin, common.pipelined_of(trainer)
        step = feature_step(pl_module, self.features)

        def run(batch: Any) -> Any:
            return step(precision.convert_input(batch))

        def run_here(batch: Any) -> Any:
            with precision.forward_context():
                return run(move_data_to_device(batch, pl_module.device))

        results = map(run_here, loader) if pipelined is None else pipelined.evaluate(run, loader)
        for result in track(trainer, description, results, length):
            yield None if result is None else as_vectors(*result)

    def _share(self, trainer: Trainer, source: Source) -> tuple[Iterable[Any], int | None]:
        """This member's batches, and their number if it is known."""
        group = DataParallelGroup(trainer)
        first, stop, step = group.rank, self.limit, group.size
        # A Dataset has no protocol that tells it from a loader, except that it is not iterable.
        if isinstance(source, Dataset):
            samples = range(len(source))  # type: ignore[arg-type]
            batches = list(BatchSampler(samples, self.batch_size, drop_last=False))
            mine = batches[first:stop:step]
            return DataLoader(source, batch_sampler=mine), len(mine)
        length = stop
        with suppress(TypeError):
            length = len(range(len(source))[:stop])  # type: ignore[arg-type]
        number = None if length is None else len(range(first, length, step))
        return _sliced(source, first, stop, step), number


def _sliced(items: Iterable[T], *part: int | None) -> Iterator[T]:
    """As ``islice``, but the items are not asked for an iterator before they are read."""
    yield from islice(items, *part)


def track(trainer: Trainer, description: str, items: Iterable[T], total: int | None) -> Iterator[T]:
    """Yield the items, and show how many below the Trainer's progress bar, in the same style.

    Nothing is shown where the Trainer shows nothing.
    """
    bar: Any = trainer.progress_bar_callback
    display = getattr(bar, "progress", None)
    if bar is None or bar.is_disabled:
        yield from items
    elif display is None:
        yield from Tqdm(
            items, description, total, leave=False, position=1, dynamic_ncols=True, file=sys.stdout
        )
    else:  # RichProgressBar
        # Lightning finds its tasks by position, so a task is hidden and used again, never removed.
        known = (task.id for task in display.tasks if task.description == description)
        task = next(known, None)
        if task is None:
            task = display.add_task(description)
        display.reset(task, total=total, visible=True)
        try:
            for item in items:
                yield item
                display.advance(task)
        finally:
            display.update(task, visible=False)


@contextmanager
def evaluating(pl_module: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; modes and random state are restored afterwards."""
    modes = [(module, "training", module.training) for module in pl_module.modules()]
    with isolate_rng(), torch.no_grad(), attributes_replaced(modes):
        pl_module.eval()
        yield
