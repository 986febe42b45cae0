"""The activation cache: reads what frozen layers returned, computes and stores what is missing.

And measured times of both: is caching worth it?
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.caching import entries
from lightning_tspipe.caching.arena import Arena, Folder, megabytes
from lightning_tspipe.caching.entries import Numbers
from lightning_tspipe.caching.keys import Boundary, Ids, as_ids, digests
from lightning_tspipe.caching.store import Store, StoreHandle, new_table
from lightning_tspipe.errors import ConfigurationError


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


class ActivationCache(Store):
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
        counts: Hits and misses since they were last set.

    Raises:
        ConfigurationError: Budgets below zero or both zero, or above what is free.
    """

    def __init__(
        self, num_samples: int, memory: int = 0, disk: int = 0, folder: Folder = None
    ) -> None:
        if num_samples < 1 or memory < 0 or disk < 0 or memory + disk == 0:
            raise ConfigurationError(
                f"a cache for {num_samples} samples in {memory} bytes of memory and {disk} bytes "
                "on disk: give at least one sample, and memory or disk a budget above 0"
            )
        super().__init__(
            # Of each sample, a row for its activations and one for its other parts
            new_table(2 * num_samples),
            Arena.in_memory(memory) if memory else None,
            Arena.on_disk(folder, disk) if disk else None,
        )
        self.counts = Counts()

    @classmethod
    def attach(cls, handle: StoreHandle) -> ActivationCache:
        """Attach to the cache of another process of this machine.

        Raises:
            ConfigurationError: It can't be reached.
        """
        table, memory, disk = (part and Arena.attached(part) for part in handle)
        assert table is not None
        cache = cls.__new__(cls)
        Store.__init__(cache, table, memory, disk)
        cache.counts = Counts()
        return cache

    def __reduce__(self) -> tuple[Any, ...]:
        return ActivationCache.attach, (self.handle,)

    def outputs(
        self, ids: Ids, inputs: Any, segments: Sequence[Segment], device: torch.device | None = None
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
        ids = as_ids(ids)
        device = device or next((tensor.device for tensor in entries.tensors_in(inputs)), None)
        rows = self._rows_of(ids)
        behind = self._behind(rows, segments)
        parts: list[tuple[Numbers, Any]] = []
        for number in np.unique(behind)[::-1]:
            members = np.flatnonzero(behind == number)
            done, value = int(number), None
            if done:
                value = self.read_rows(rows[members], segments[done - 1].boundary, device)
            if value is None:
                done = behind[members] = 0
                value = inputs if len(members) == len(ids) else entries.rows_of(inputs, members)
                if self.may_lack_inputs:
                    entries.check_loaded(value)
            with torch.no_grad():
                for segment in segments[done:]:
                    value = entries.rounded(segment.function(value), segment.boundary.dtype)
            parts.append((members, value))
        value = pytree.tree_map_only(Tensor, Tensor.detach, entries.assembled(parts))
        self.count(behind, segments)
        self.keep(ids, value, segments, behind)
        return value

    def _rows_of(self, ids: Ids) -> Numbers:
        """The samples' rows in the store, after pending writes to them."""
        rows = self.find(digests(as_ids(ids)))
        self.settle(rows)
        return rows

    def _behind(self, rows: Numbers, segments: Sequence[Segment]) -> Numbers:
        """The number of segments behind which the samples of some rows are cached; 0: none."""
        here = self.tokens(rows)
        behind = np.zeros(len(rows), np.int64)
        for number, segment in enumerate(segments, start=1):
            behind[here == np.uint64(segment.boundary.token)] = number
        return behind

    # The parts of :meth:`outputs`, for processes that compute one after the other

    def behind(self, ids: Ids, segments: Sequence[Segment]) -> Numbers:
        """The number of segments behind which each sample is cached; 0: not cached.

        Raises:
            ConfigurationError: The same id twice.
        """
        return self._behind(self._rows_of(ids), segments)

    def read(self, ids: Ids, boundary: Boundary, device: torch.device | None = None) -> Any:
        """The entries of samples that are all cached at this boundary.

        Raises:
            ConfigurationError: One of them is not, since another process has replaced it.
        """
        found = self.read_rows(self._rows_of(ids), boundary, device)
        if found is None:
            raise ConfigurationError(
                f"an activation that was cached at {boundary.name!r} is no longer there: a sample "
                "came twice in one epoch. Samplers that repeat samples (replacement=True) don't "
                "work with a cache"
            )
        return found

    def count(self, behind: Numbers, segments: Sequence[Segment]) -> None:
        """Count samples that were looked up; ``behind`` is the result of :meth:`behind`."""
        num_hits, num_misses = int((behind == len(segments)).sum()), int((behind == 0).sum())
        self.counts.hits += num_hits
        self.counts.pushed += len(behind) - num_hits - num_misses
        self.counts.misses += num_misses

    def keep(self, ids: Ids, value: Any, segments: Sequence[Segment], behind: Numbers) -> None:
        """Store the outputs of the last segment that are not cached yet.

        Args:
            ids: Ids of the samples.
            value: The outputs of all of them.
            segments: All frozen layers, in order.
            behind: Result of :meth:`behind`, from before.
        """
        new = np.flatnonzero(behind < len(segments))
        if len(new):
            value = value if len(new) == len(behind) else entries.rows_of(value, new)
            words = digests(as_ids(ids))[new]
            self.counts.refused += len(new) - self.write(words, value, segments[-1].boundary)

    # For datasets: inputs that need not be loaded

    def let_skip(self, segments: Sequence[Segment]) -> None:
        """Let datasets skip the inputs of samples that are cached behind these segments."""
        tokens = tuple(segment.boundary.token for segment in segments)
        with self._table.locked():
            notes = self._known()
            may_lack_inputs = notes.may_lack_inputs or bool(tokens)
            self._publish(replace(notes, readable=tokens, may_lack_inputs=may_lack_inputs))

    def can_skip(self, ids: Sequence[Hashable]) -> list[bool]:
        """Whether the inputs of each sample need not be loaded; prefetches entries from disk."""
        rows = self.find(digests(ids))
        known = np.isin(self.tokens(rows), np.array(self._known().readable, np.uint64))
        self.prefetch_rows(rows[known])
        return [bool(one) for one in known]

    def __repr__(self) -> str:
        memory, disk = map(megabytes, self.num_bytes)
        return f"ActivationCache({memory} in memory, {disk} on disk, {self.counts})"


@dataclass(frozen=True)
class Worth:
    """Measured seconds per sample.

    Attributes:
        compute: Running the frozen layers on inputs.
        memory: Reading their outputs from memory.
        disk: Reading them from disk, with a cold page cache; infinite if not measured.
        load: Loading and decoding the inputs, which a hit saves; 0 if they are loaded anyway.
        num_bytes: Bytes of an entry.
    """

    compute: float
    memory: float
    disk: float = math.inf
    load: float = 0.0
    num_bytes: int = 0

    @property
    def by_memory(self) -> bool:
        """Whether reading from memory is faster than computing."""
        return self.memory < self.compute + self.load

    @property
    def by_disk(self) -> bool:
        """Whether reading from disk is faster than computing."""
        return self.disk < self.compute + self.load

    def __str__(self) -> str:
        read = f"{1e3 * self.memory:.3f} ms from memory"
        if math.isfinite(self.disk):
            read += f", {1e3 * self.disk:.3f} ms from disk"
        load = f" (and {1e3 * self.load:.3f} ms to load the input)" if self.load else ""
        return (
            f"per sample {1e3 * self.compute:.3f} ms to compute{load}, {read}; "
            f"{self.num_bytes / 1e6:.3f} MB"
        )


def measure(function: Callable[[Any], Any], inputs: Any, *, repeats: int = 3, **how: Any) -> Worth:
    """Compute a batch's activations and read them, several times each; the shortest time counts.

    Args:
        function: The frozen layers.
        inputs: Inputs of a batch; a structure of tensors.
        repeats: Runs of each kind, after one that is not counted.
        how: Other arguments of :func:`measure_reading`.
    """
    num_samples = len(entries.tensors_in(inputs)[0])
    with torch.no_grad():
        compute, value = _shortest(lambda: function(inputs), repeats)
    worth = measure_reading(value, num_samples, repeats=repeats, **how)
    return replace(worth, compute=compute / num_samples)


def measure_reading(  # noqa: PLR0913 - what, and how
    value: Any,
    num_samples: int,
    *,
    dtype: torch.dtype | None = None,
    disk: bool = False,
    folder: Folder = None,
    repeats: int = 3,
) -> Worth:
    """Measure how long reading a batch takes; the time of computing it is 0 in the result.

    Args:
        value: Outputs of the frozen layers.
        num_samples: Samples in the batch.
        dtype: Type in which activations would be stored.
        disk: Whether to measure the disk too.
        folder: A folder on the file system for the disk's part.
        repeats: Runs of each kind, after one that is not counted.
    """
    size = entries.layout_of(value, num_samples, dtype).size
    budget = 2 * num_samples * (size + 64)
    segments = [Segment(Boundary("measured", dtype=dtype), lambda _: value)]

    def seconds(**where: Any) -> float:
        cache = ActivationCache(num_samples, **where)
        try:
            read = partial(cache.outputs, range(num_samples), value, segments)
            return _shortest(read, repeats, cache.forget)[0] / num_samples
        finally:
            cache.close()

    from_disk = math.inf
    if disk:
        with suppress(ConfigurationError):  # it has filled up since the start: never worth it
            from_disk = seconds(disk=budget, folder=folder)
    return Worth(0.0, seconds(memory=budget), from_disk, num_bytes=size)


def _shortest(
    work: Callable[[], Any], repeats: int, before: Callable[[], None] = lambda: None
) -> tuple[float, Any]:
    """The time of the fastest run, in seconds, and what it returned."""
    seconds, value = math.inf, work()
    for _ in range(repeats):
        before()
        started = time.perf_counter()
        value = work()
        for tensor in entries.tensors_in(value):
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
        seconds = min(seconds, time.perf_counter() - started)
    return seconds, value
