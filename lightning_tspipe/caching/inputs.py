"""Datasets whose samples have ids, and whose inputs are loaded only where they are needed."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lightning_tspipe.caching.absent import absent
from lightning_tspipe.caching.cache import ActivationCache
from lightning_tspipe.caching.repeatable import fixed_random_numbers
from lightning_tspipe.errors import ConfigurationError

Path = int | str
"""A part of a sample: its number, or its key."""
ID = "id"
"""The key of the id in samples that are dictionaries."""


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
                f"{type(dataset).__name__} only iterates over samples; activations are cached by "
                "sample, which needs a dataset with __getitem__ and __len__"
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
        self.inputs = _paths(inputs)
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

    def _read(self, index: int) -> Any:
        """A sample of the dataset, or a view of it."""
        if self.views is None:
            return self.dataset[index]
        with fixed_random_numbers(int(index)):
            return self.dataset[int(index) % len(self.dataset)]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch."""
        found = [self.id_of(index) for index in indices]
        cache = self._cache
        if cache is None:
            return [self._full(index, name) for index, name in zip(indices, found, strict=True)]
        skip = cache.can_skip(found)
        return [
            self._sample(cache, index, name, leave_out=out)
            for index, name, out in zip(indices, found, skip, strict=True)
        ]

    def _full(self, index: int, name: Hashable) -> Any:
        return _with_id(self._read(index), name)

    def _sample(
        self, cache: ActivationCache, index: int, name: Hashable, *, leave_out: bool
    ) -> Any:
        if not self.inputs:
            return self._full(index, name)
        rest = cache.store.rest(name)
        if leave_out and rest is not None:
            sample, specs = pickle.loads(rest)  # noqa: S301 - a process of this job wrote it
            stands_in = {path: absent(*spec) for path, spec in specs.items()}
            return _with_id(_with_parts(sample, stands_in), name)
        sample = self._read(index)
        if rest is None:
            specs = {path: self._spec(sample, path) for path in self.inputs}
            without = _with_parts(sample, dict.fromkeys(self.inputs))
            cache.store.keep_rest(name, pickle.dumps((without, specs)))
        return _with_id(sample, name)

    def _spec(self, sample: Any, path: Path) -> tuple[tuple[int, ...], torch.dtype]:
        parts = sample if isinstance(sample, dict | list | tuple) else (sample,)
        tensor = part_of(parts, path)
        if not isinstance(tensor, Tensor):
            raise ConfigurationError(
                f"WithIds(inputs={path!r}): a sample has no tensor there, but {tensor!r}"
            )
        return tuple(tensor.shape), tensor.dtype

    def read_from(self, cache: ActivationCache | None) -> None:
        """Leave out inputs whose activations are cached, from the next epoch's workers on."""
        self._cache = cache


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


def _paths(inputs: Path | Sequence[Path] | None) -> tuple[Path, ...]:
    if inputs is None:
        return ()
    return (inputs,) if isinstance(inputs, int | str) else tuple(inputs)


def _check_unique(ids: Sequence[Hashable], length: int) -> None:
    if len(ids) != length:
        raise ConfigurationError(f"{len(ids)} ids for {length} samples: give one for each")
    seen: set[Hashable] = set()
    for name in ids:
        if name in seen:
            raise ConfigurationError(
                f"duplicate sample id {name!r}: activations are cached by id, and two samples "
                "would share them. Without ids=, samples are numbered"
            )
        seen.add(name)


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
        "behind the other parts of a sample, or say where they are"
    )
