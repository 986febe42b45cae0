"""The activation cache: reads what frozen layers returned, computes and stores what is missing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.caching.absent import check_loaded
from lightning_tspipe.caching.arena import megabytes
from lightning_tspipe.caching.entries import device_of, layout_of, rounded, rows_of, split
from lightning_tspipe.caching.index import Numbers
from lightning_tspipe.caching.keys import Boundary, Words, as_ids, digests
from lightning_tspipe.caching.store import Store, StoreHandle
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import sent


@dataclass(frozen=True)
class Segment:
    """Consecutive frozen layers, up to a boundary.

    Attributes:
        boundary: The boundary behind the last layer.
        function: ``function(inputs) -> outputs`` without gradients; both a tensor or a structure
            of tensors, whose first dimension is the samples of a batch.
    """

    boundary: Boundary
    function: Callable[[Any], Any]


@dataclass
class Counts:
    """Numbers of samples that this process has looked up since the last reset.

    Attributes:
        hits: Read at the last boundary.
        pushed: Read at an earlier boundary, and run through the layers that froze since.
        misses: Computed from inputs.
        refused: Computed, and not stored because there was no space.
    """

    hits: int = 0
    pushed: int = 0
    misses: int = 0
    refused: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the samples that were read; 0 without samples."""
        total = self.hits + self.pushed + self.misses
        return (self.hits + self.pushed) / total if total else 0.0


class ActivationCache:
    """Caches activations of samples by id, for all processes of a machine.

    One process makes it, the others attach themselves::

        cache = ActivationCache(len(dataset), memory=2**30)
        handle = cache.handle  # send it to the others
        same = ActivationCache.attach(handle)

    Entries fill the memory, then the disk; further samples are computed in every epoch. Entries are
    never evicted: each epoch reads each sample once, so all are worth the same.

    Args:
        num_samples: Largest number of different ids.
        memory: Bytes of shared memory; 0: none.
        disk: Bytes on disk; 0: none.
        folder: A folder on the file system for the disk's part; None: the temporary folder.

    Attributes:
        store: Storage of the entries.
        counts: Hits and misses since they were last set.

    Raises:
        ConfigurationError: Budgets below zero or both zero, or above what is free.
    """

    def __init__(
        self,
        num_samples: int,
        memory: int = 0,
        disk: int = 0,
        folder: str | PathLike[str] | None = None,
    ) -> None:
        if num_samples < 1 or memory < 0 or disk < 0 or memory + disk == 0:
            raise ConfigurationError(
                f"a cache for {num_samples} samples in {memory} bytes of memory and {disk} bytes "
                "on disk: give at least one sample, and memory or disk a budget above 0"
            )
        # Of each sample, a row for its activations and one for its other parts
        self._set(Store.create(2 * num_samples, memory, disk, folder))

    def _set(self, store: Store) -> None:
        self.store = store
        self.counts = Counts()
        self._finalizer = weakref.finalize(self, store.close)

    @classmethod
    def attach(cls, handle: StoreHandle) -> ActivationCache:
        """Attach to the cache of another process of this machine.

        Raises:
            ConfigurationError: It can't be reached.
        """
        cache = cls.__new__(cls)
        cache._set(Store.attached(handle))  # noqa: SLF001 - an object of this class
        return cache

    @property
    def handle(self) -> StoreHandle:
        """Argument of :meth:`attach`, valid while this process lives."""
        return self.store.handle

    def __reduce__(self) -> tuple[Any, ...]:
        return ActivationCache.attach, (self.handle,)

    def use(self, *, memory: bool, disk: bool) -> None:
        """Choose where this process stores further activations."""
        self.store.use(memory=memory, disk=disk)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Used bytes of memory and disk, by all processes."""
        return self.store.num_bytes

    def outputs(
        self,
        ids: Tensor | Sequence[Hashable],
        inputs: Any,
        segments: Sequence[Segment],
        device: torch.device | None = None,
    ) -> Any:
        """Read or compute the outputs of the frozen layers for a batch.

        Each sample is read at the last boundary where it is cached and runs through the segments
        behind that; the output replaces the entry. If boundaries have a ``dtype``, all outputs of
        segments are rounded to it, so that results do not depend on what was cached.

        Args:
            ids: Ids of the samples, in the order of the batch.
            inputs: Inputs of the first segment; only rows of samples without an entry are used.
            segments: All frozen layers, in order.
            device: Device of the outputs; None: that of the inputs.

        Returns:
            The last segment's outputs for the whole batch, detached.

        Raises:
            ConfigurationError: The same id twice; outputs whose first dimension is not the
                samples, or whose shape differs between batches; inputs that were not loaded.
        """
        found, device = as_ids(ids), device or device_of(inputs)
        words = digests(found)
        rows = self._rows(words)
        behind = self._behind(rows, segments)
        parts: list[tuple[Numbers, Any]] = []
        for number in np.unique(behind)[::-1]:
            members = np.flatnonzero(behind == number)
            token = segments[number - 1].boundary.token if number else 0
            kept = self.store.read(rows[members], token) if number else None
            if kept is not None:
                done, value = int(number), split(*kept, device)
            else:
                done = 0
                value = inputs if len(members) == len(found) else rows_of(inputs, members)
                if self.may_lack_inputs:
                    check_loaded(value)
            parts.append((members, self._finish(words[members], value, segments, done)))
        return _assembled(parts)

    def _rows(self, words: Words) -> Numbers:
        """The samples' rows, after pending writes to them."""
        rows = self.store.table.find(words)
        self.store.settle(rows)
        return rows

    @property
    def may_lack_inputs(self) -> bool:
        """Whether a dataset may have left out inputs; only then they must be checked."""
        return self.store.table.may_lack_inputs

    def _behind(self, rows: Numbers, segments: Sequence[Segment]) -> Numbers:
        """The number of segments behind which the samples of some rows are cached; 0: none."""
        here = self.store.table.tokens(rows)
        behind = np.zeros(len(rows), np.int64)
        for number, segment in enumerate(segments, start=1):
            behind[here == np.uint64(segment.boundary.token)] = number
        return behind

    # The parts of :meth:`outputs`, for processes that compute one after the other

    def behind(self, ids: Tensor | Sequence[Hashable], segments: Sequence[Segment]) -> Numbers:
        """The number of segments behind which each sample is cached; 0: not cached.

        Raises:
            ConfigurationError: The same id twice.
        """
        return self._behind(self._rows(digests(as_ids(ids))), segments)

    def read(
        self,
        ids: Tensor | Sequence[Hashable],
        boundary: Boundary,
        device: torch.device | None = None,
    ) -> Any:
        """The entries of samples that are all cached at this boundary.

        Raises:
            ConfigurationError: One of them is not, since another process has replaced it.
        """
        rows = self._rows(digests(as_ids(ids)))
        found = None
        if (self.store.table.tokens(rows) == np.uint64(boundary.token)).all():
            found = self.store.read(rows, boundary.token)
        if found is None:
            raise ConfigurationError(
                f"an activation that was cached at {boundary.name!r} is no longer there: a sample "
                "came twice in one epoch. Samplers that repeat samples (replacement=True) don't "
                "work with a cache"
            )
        return split(*found, device)

    def keep(
        self,
        ids: Tensor | Sequence[Hashable],
        value: Any,
        segments: Sequence[Segment],
        behind: Numbers,
    ) -> None:
        """Count samples, and store the outputs of the last segment that are not cached yet.

        Args:
            ids: Ids of the samples.
            value: The outputs of all of them.
            segments: All frozen layers, in order.
            behind: Result of :meth:`behind`, from before.
        """
        new = np.flatnonzero(behind < len(segments))
        num_pushed = int((behind[new] > 0).sum())
        self.counts.hits += len(behind) - len(new)
        self.counts.pushed += num_pushed
        self.counts.misses += len(new) - num_pushed
        if len(new):
            value = value if len(new) == len(behind) else rows_of(value, new)
            words = digests(as_ids(ids))[new]
            self.counts.refused += len(new) - self._write(words, value, segments[-1].boundary)

    def _finish(self, words: Any, value: Any, segments: Sequence[Segment], number: int) -> Any:
        """Run the segments from the given number on, count, and store the outputs."""
        num = len(words)
        if number == len(segments):
            self.counts.hits += num
            return value
        with torch.no_grad():
            for segment in segments[number:]:
                value = rounded(segment.function(value), segment.boundary.dtype)
        value = pytree.tree_map_only(Tensor, Tensor.detach, value)
        if number:
            self.counts.pushed += num
        else:
            self.counts.misses += num
        num_kept = self._write(words, value, segments[-1].boundary)
        self.counts.refused += num - num_kept
        return value

    def _write(self, words: Any, value: Any, boundary: Boundary) -> int:
        """Store the outputs of samples; returns for how many there was space."""
        layout = layout_of(value, len(words), boundary.dtype)
        noted = self.store.note(boundary.token, layout)
        if noted != layout:
            raise ConfigurationError(
                f"the activations of one sample at {boundary.name!r} are {layout}, those of "
                f"another {noted}, and the cache needs one shape. Pad all inputs to one length"
            )
        return self.store.write(words, value, layout, boundary.token)

    def kept(self, ids: Tensor | Sequence[Hashable], segments: Sequence[Segment]) -> list[bool]:
        """Whether each of these samples is cached behind one of the segments."""
        tokens = [np.uint64(segment.boundary.token) for segment in segments]
        rows = self._rows(digests(as_ids(ids)))
        return [bool(known) for known in np.isin(self.store.table.tokens(rows), tokens)]

    # For datasets: inputs that need not be loaded

    def let_skip(self, segments: Sequence[Segment]) -> None:
        """Let datasets skip the inputs of samples that are cached behind these segments."""
        self.store.table.let_read([segment.boundary.token for segment in segments])

    def can_skip(self, ids: Sequence[Hashable]) -> list[bool]:
        """Whether the inputs of each sample need not be loaded; prefetches entries from disk."""
        rows = self.store.table.find(digests(ids))
        known = self.store.table.is_readable(rows)
        self.store.prefetch(rows[known])
        return [bool(one) for one in known]

    def prefetch(self, ids: Sequence[Hashable]) -> None:
        """Prefetch the entries of samples from disk, in the background."""
        rows = self.store.table.find(digests(ids))
        self.store.prefetch(rows[self.store.table.tokens(rows) > 1])

    def close(self) -> None:
        """Close the cache; its contents are lost with the last process. Twice is fine."""
        self._finalizer()

    def __repr__(self) -> str:
        memory, disk = map(megabytes, self.num_bytes)
        return f"ActivationCache({memory} in memory, {disk} on disk, {self.counts})"


def _assembled(parts: Sequence[tuple[Numbers, Any]]) -> Any:
    """Assemble a batch from groups of its samples."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.from_numpy(np.argsort(np.concatenate([members for members, _ in parts])))

    def merged(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return torch.cat(leaves).index_select(0, sent(order, leaves[0].device))

    return pytree.tree_map(merged, *(value for _, value in parts))
