"""Datasets whose samples have ids and do not change, and whose inputs need not be loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset

from lightning_tspipe.caching.cache import ActivationCache
from lightning_tspipe.caching.entries import absent
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.random_states import RandomStates, random_stream

Path = int | str
"""A part of a sample: its number, or its key."""
ID = "id"
"""The key of the id in samples that are dictionaries."""
_HOW = (
    ": random augmentation. Its activations can't be cached. Train with fixed inputs (resize and "
    "centre crop), with a few fixed views of each sample (WithIds(dataset, views=4)), augment "
    "after the frozen layers, or train without the cache (cache=None)"
)


class WithIds(Dataset[Any]):
    """A dataset that appends an id to each sample of another dataset.

    A sample ``(picture, label)`` becomes ``(picture, label, id)``, a dictionary gets a key
    ``"id"``, anything else becomes ``(sample, id)``.

    Args:
        dataset: A dataset with a length, and samples by index.
        ids: An integer or a string for each sample, the same in every run; None: the index.
        views: Number of fixed random views of each sample, for datasets that augment: the dataset
            becomes this many times as long, and each view has random numbers of its own, the same
            each time.
        inputs: The parts of a sample that only the frozen layers read: ``0`` or ``"tokens"``, or
            several of them. While their activations are cached they are not loaded, and replaced by
            NaN or by numbers out of range. None: everything is loaded.

    Raises:
        ConfigurationError: A dataset without length or index; ids that are too few or not unique;
            fewer than one view.
    """

    def __init__(
        self,
        dataset: Any,
        ids: Sequence[Hashable] | None = None,
        inputs: Path | Sequence[Path] | None = None,
        *,
        views: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigurationError(
                f"{type(dataset).__name__} is an iterable-style dataset; activations are cached by "
                "sample, which needs a map-style one, with __getitem__ and __len__"
            )
        if ids is not None:
            _check_unique(ids, len(dataset))
        if views is not None and views < 1:
            raise ConfigurationError(
                f"WithIds(views={views}): the number of fixed random views of each sample must be "
                "at least 1; None gives the samples as they are"
            )
        self.dataset = dataset
        self.views = views
        self.ids = ids
        self.inputs = (inputs,) if isinstance(inputs, int | str) else tuple(inputs or ())
        self._cache: ActivationCache | None = None

    def __len__(self) -> int:
        return len(self.dataset) * (self.views or 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def id_of(self, index: int) -> Hashable:
        """The id of a sample, or of a view of it."""
        if self.ids is None:
            return int(index)
        view, place = divmod(int(index), len(self.dataset))
        return self.ids[place] if self.views is None else f"{self.ids[place]!r}, view {view}"

    def read_from(self, cache: ActivationCache | None) -> None:
        """Leave out inputs whose activations are cached, from the next epoch's workers on."""
        self._cache = cache

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch."""
        names = [self.id_of(index) for index in indices]
        skip = [False] * len(names) if self._cache is None else self._cache.can_skip(names)
        return [
            _with_id(self._read_or_skip(index, name, leave_out=out), name)
            for index, name, out in zip(indices, names, skip, strict=True)
        ]

    def _read(self, index: int) -> Any:
        """A sample of the dataset, or a view of it."""
        if self.views is None:
            return self.dataset[index]
        with random_stream(int(index)):
            return self.dataset[int(index) % len(self.dataset)]

    def _read_or_skip(self, index: int, name: Hashable, *, leave_out: bool) -> Any:
        if self._cache is None or not self.inputs:
            return self._read(index)
        rest = self._cache.rest(name)
        if leave_out and rest is not None:
            sample, specs = rest
            return _with_parts(sample, {path: absent(*spec) for path, spec in specs.items()})
        sample = self._read(index)
        if rest is None:
            specs = {path: _spec(sample, path) for path in self.inputs}
            without = _with_parts(sample, dict.fromkeys(self.inputs))
            self._cache.keep_rest(name, (without, specs))
        return sample


def _spec(sample: Any, path: Path) -> tuple[tuple[int, ...], torch.dtype]:
    parts = sample if isinstance(sample, dict | list | tuple) else (sample,)
    tensor = part_of(parts, path)
    if not isinstance(tensor, Tensor):
        raise ConfigurationError(
            f"WithIds(inputs={path!r}): expected a tensor there, but a sample has {tensor!r}"
        )
    return tuple(tensor.shape), tensor.dtype


def _with_parts(sample: Any, parts: Mapping[Any, Any]) -> Any:
    """A copy of a sample in which some parts, by number or key, are replaced."""
    if isinstance(sample, dict):
        return {**sample, **parts}
    values = list(sample) if isinstance(sample, list | tuple) else [sample]
    for place, part in parts.items():
        values[place] = part
    return values if isinstance(sample, list) else tuple(values)


def part_of(sample: Any, path: Path) -> Any:
    """A part of a sample or a batch by its number or key; None if there is none."""
    try:
        return sample[path]
    except (KeyError, IndexError, TypeError):
        return None


def _with_id(sample: Any, name: Hashable) -> Any:
    if isinstance(sample, dict):
        if ID in sample:
            raise ConfigurationError(
                f"samples have a key {ID!r} already: use these ids, without WithIds"
            )
        return {**sample, ID: name}
    if isinstance(sample, list):
        return [*sample, name]
    return (*sample, name) if isinstance(sample, tuple) else (sample, name)


def _check_unique(ids: Sequence[Hashable], length: int) -> None:
    if len(ids) != length:
        raise ConfigurationError(f"{len(ids)} ids for {length} samples: give one for each")
    name, number = Counter(ids).most_common(1)[0] if length else (None, 1)
    if number > 1:
        raise ConfigurationError(
            f"duplicate sample id {name!r}: activations are cached by id, and two samples "
            "would share them. Without ids=, samples are numbered"
        )


def ids_of(batch: Any, where: Path | None = None) -> Any:
    """The sample ids of a batch.

    Args:
        batch: A batch of the loader.
        where: Number or key of the ids in it; None: where :class:`WithIds` puts them.

    Raises:
        ConfigurationError: The batch has none.
    """
    if where is None:
        where = ID if isinstance(batch, dict) else -1
    found = part_of(batch, where)
    integers = isinstance(found, Tensor) and found.dim() == 1 and not found.is_floating_point()
    if integers or (isinstance(found, list | tuple) and found and isinstance(found[0], str | int)):
        return found
    raise ConfigurationError(
        f"the batch has no sample ids at {where!r}: train on WithIds(dataset), which puts them "
        "after the other parts of a sample, or say where they are (ids=)"
    )


def check_repeatable(dataset: Any, num_samples: int = 4, num_readings: int = 2) -> None:
    """Read some samples several times, and refuse a dataset whose samples change.

    The random states are restored afterwards.

    Args:
        dataset: A dataset with a length, and samples by index.
        num_samples: Number of samples to read, spread over the dataset.
        num_readings: Number of readings of each sample.

    Raises:
        ConfigurationError: The samples differ, or reading them draws random numbers.
    """
    length = len(dataset)
    with random_stream(None) as before:
        for index in sorted({n * length // num_samples for n in range(num_samples)}):
            first, *others = [dataset[index] for _ in range(num_readings)]
            if any(_contents(first) != _contents(other) for other in others):
                raise ConfigurationError(f"sample {index} is different each time it is read{_HOW}")
        if _contents(before.written) != _contents(RandomStates.now().written):
            raise ConfigurationError(f"the dataset draws random numbers when it is read{_HOW}")


def _contents(sample: Any) -> list[Any]:
    """What can be compared of a sample; nothing of objects of unknown kinds."""
    return [_content(leaf) for leaf in pytree.tree_leaves(sample)]


def _content(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        array = np.asarray(value)
        return array.shape, array.tobytes()
    return repr(value) if isinstance(value, int | float | str | bytes) else None  # NaN is NaN
