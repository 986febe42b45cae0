"""Reads what frozen layers returned, and computes and keeps what is not there yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.caching.absent import check_loaded
from lightning_tspipe.caching.arena import Arena, ArenaHandle, megabytes
from lightning_tspipe.caching.entries import Layout, device_of, join, layout_of, rows_of, split
from lightning_tspipe.caching.index import Index, Numbers
from lightning_tspipe.caching.keys import Boundary, as_ids, digests
from lightning_tspipe.errors import ConfigurationError

_REST = 1
"""The token of what a dataset keeps of a sample besides its inputs."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Segment:
    """Some frozen layers.

    Attributes:
        boundary: Where they end.
        function: ``function(inputs) -> outputs`` without gradients; both a tensor or a structure
            of tensors, whose first dimension is the samples of a batch.
    """

    boundary: Boundary
    function: Callable[[Any], Any]


class CacheHandle(NamedTuple):
    """Where the other processes of a machine find a cache; small, and can be pickled."""

    table: ArenaHandle
    memory: ArenaHandle | None
    disk: ArenaHandle | None


@dataclass
class Counts:
    """Samples since the last reset, of this process.

    Attributes:
        hits: Read where they were wanted.
        pushed: Read at an earlier boundary, and pushed through what froze since.
        misses: Computed from inputs.
        refused: Of these, not kept because there was no space.
    """

    hits: int = 0
    pushed: int = 0
    misses: int = 0
    refused: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the samples whose inputs were not needed; 0 without samples."""
        total = self.hits + self.pushed + self.misses
        return (self.hits + self.pushed) / total if total else 0.0


class ActivationCache:
    """Keeps activations of samples by id, for all processes of a machine.

    One process makes it, the others attach themselves::

        cache = ActivationCache(len(dataset), memory=2**30)
        handle = cache.handle  # send it to the others
        same = ActivationCache.attach(handle)

    Entries fill the memory, then the disk; further samples are computed in every epoch. None is
    thrown out for another: each epoch reads each sample once, so all are worth the same.

    Args:
        num_samples: With an id of their own, at most.
        memory: Bytes of shared memory; 0: none.
        disk: Bytes on disk; 0: none.
        folder: On the file system for the disk's part; None: the system's temporary one.

    Attributes:
        counts: What happened since they were last set.

    Raises:
        ConfigurationError: Budgets below zero or both zero, or more than there is.
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
        # A row for the activations of a sample, and one for the rest of it
        self._set(
            Index.create(2 * num_samples),
            Arena.in_memory(memory) if memory else None,
            Arena.on_disk(folder, disk) if disk else None,
        )

    def _set(self, index: Index, memory: Arena | None, disk: Arena | None) -> None:
        self._index = index
        self._arenas = (memory, disk)
        self._in_use: list[Arena | None] = [memory, disk]
        self.counts = Counts()
        self._finalizer = weakref.finalize(self, _close, index, self._arenas)

    @classmethod
    def attach(cls, handle: CacheHandle) -> ActivationCache:
        """The cache that another process of this machine has made.

        Raises:
            ConfigurationError: It can't be reached.
        """
        cache = cls.__new__(cls)
        parts = [None if part is None else Arena.attached(part) for part in handle[1:]]
        cache._set(  # noqa: SLF001 - an object of this class
            Index.attached(handle.table), *parts
        )
        return cache

    @property
    def handle(self) -> CacheHandle:
        """For :meth:`attach`, while this process lives."""
        memory, disk = (None if arena is None else arena.handle for arena in self._arenas)
        return CacheHandle(self._index.handle, memory, disk)

    def __reduce__(self) -> tuple[Any, ...]:
        return ActivationCache.attach, (self.handle,)

    def use(self, *, memory: bool, disk: bool) -> None:
        """Where further activations are kept, by this process."""
        self._in_use = [
            arena if wanted else None
            for arena, wanted in zip(self._arenas, (memory, disk), strict=True)
        ]

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Used bytes of memory and disk, by all processes."""
        return self._index.used(0), self._index.used(1)

    def outputs(
        self, ids: Tensor | Sequence[Hashable], inputs: Any, segments: Sequence[Segment]
    ) -> Any:
        """What the frozen layers return for a batch.

        Each sample is read at the last boundary where it is kept; what follows of the segments is
        computed, and what comes out is kept in the place of what was read.

        Args:
            ids: Of the samples, in the order of the batch.
            inputs: Of the first segment; only rows are used whose samples are kept nowhere.
            segments: All frozen layers, in order.

        Returns:
            The last segment's outputs for the whole batch, detached.

        Raises:
            ConfigurationError: The same id twice; outputs whose first dimension is not the
                samples, or whose shape differs between batches; inputs that were not loaded.
        """
        found = as_ids(ids)
        words = digests(found)
        rows = self._index.find(words)
        behind = self._behind(rows, segments)
        parts: list[tuple[Numbers, Any]] = []
        for number in np.unique(behind)[::-1]:
            members = np.flatnonzero(behind == number)
            kept = self._read(rows[members], segments[number - 1].boundary) if number else None
            if kept is not None:
                done, value = int(number), split(*kept, device_of(inputs))
            else:
                done = 0
                value = inputs if len(members) == len(found) else rows_of(inputs, members)
                check_loaded(value)
            parts.append((members, self._finish(words[members], value, segments, done)))
        return _assembled(parts)

    def _behind(self, rows: Numbers, segments: Sequence[Segment]) -> Numbers:
        """The number of segments behind which the samples of some rows are kept; 0: nowhere."""
        here = self._index.tokens(rows)
        behind = np.zeros(len(rows), np.int64)
        for number, segment in enumerate(segments, start=1):
            behind[here == np.uint64(segment.boundary.token)] = number
        return behind

    # The same in pieces, where several processes compute one after the other

    def behind(self, ids: Tensor | Sequence[Hashable], segments: Sequence[Segment]) -> Numbers:
        """The number of segments behind which each sample is kept; 0 for nowhere.

        Raises:
            ConfigurationError: The same id twice.
        """
        return self._behind(self._index.find(digests(as_ids(ids))), segments)

    def read(
        self,
        ids: Tensor | Sequence[Hashable],
        boundary: Boundary,
        device: torch.device | None = None,
    ) -> Any:
        """What is kept of some samples, all of which are kept behind this boundary.

        Raises:
            ConfigurationError: One of them is not, since another process has replaced it.
        """
        rows = self._index.find(digests(as_ids(ids)))
        found = None
        if (self._index.tokens(rows) == np.uint64(boundary.token)).all():
            found = self._read(rows, boundary)
        if found is None:
            raise ConfigurationError(
                f"an activation that was kept at {boundary.name!r} is not there any more: a sample "
                "came twice in one epoch. Samplers that repeat samples (replacement=True) can't be "
                "cached"
            )
        return split(*found, device)

    def keep(
        self,
        ids: Tensor | Sequence[Hashable],
        value: Any,
        segments: Sequence[Segment],
        behind: Numbers,
    ) -> None:
        """Count samples, and keep what came out behind the last segment where it is not kept yet.

        Args:
            ids: Of the samples.
            value: What came out, for all of them.
            segments: All frozen layers, in order.
            behind: Of :meth:`behind`, from before.
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
        """From behind some segments to behind the last one."""
        num = len(words)
        if number == len(segments):
            self.counts.hits += num
            return value
        with torch.no_grad():
            for segment in segments[number:]:
                value = segment.function(value)
        value = pytree.tree_map_only(Tensor, Tensor.detach, value)
        if number:
            self.counts.pushed += num
        else:
            self.counts.misses += num
        num_kept = self._write(words, value, segments[-1].boundary)
        self.counts.refused += num - num_kept
        return value

    def _read(self, rows: Numbers, boundary: Boundary) -> tuple[Tensor, Layout] | None:
        """The entries in some rows; None if one of them changed meanwhile."""
        layout: Layout | None = self._index.noted(boundary.token)
        if layout is None:
            return None
        data = torch.empty(len(rows), layout.size, dtype=torch.uint8)
        places = self._index.places(rows)
        self._expect(places, layout.size)
        for into, place in zip(data, places.tolist(), strict=True):
            arena = self._arenas[place & 1]
            assert arena is not None
            into.copy_(arena.memory[place >> 1 : (place >> 1) + layout.size])
        if (self._index.tokens(rows) != np.uint64(boundary.token)).any():
            return None
        return data, layout

    def _expect(self, places: Numbers, size: int) -> None:
        disk = self._arenas[1]
        if disk is not None:
            disk.expect([place >> 1 for place in places.tolist() if place & 1], size)

    def _write(self, words: Any, value: Any, boundary: Boundary) -> int:
        """Keep what a batch of samples gave; for how many there was space."""
        layout = layout_of(value, len(words), boundary.dtype)
        self._index.note(boundary.token, layout)
        noted: Layout = self._index.noted(boundary.token)
        if noted != layout:
            raise ConfigurationError(
                f"the activations of one sample at {boundary.name!r} are {layout}, those of "
                f"another {noted}: cached ones need one shape. Pad all inputs to one length"
            )
        rows = self._index.reserve(words, _aligned(layout.size), self._in_use)
        kept = np.flatnonzero(rows >= 0)
        if not len(kept):
            return 0
        if len(kept) < len(rows):
            value = rows_of(value, kept)
        self._store(rows[kept], join(value, layout))
        self._index.commit(rows[kept], boundary.token)
        return len(kept)

    def _store(self, rows: Numbers, data: Tensor) -> None:
        """Copy bytes, shape (entries, bytes), to where their rows say."""
        size = data.shape[1]
        for entry, place in zip(data, self._index.places(rows).tolist(), strict=True):
            arena = self._arenas[place & 1]
            assert arena is not None
            arena.memory[place >> 1 : (place >> 1) + size].copy_(entry)

    def num_kept(self, ids: Tensor | Sequence[Hashable], segments: Sequence[Segment]) -> int:
        """How many of these samples are kept behind one of the segments."""
        return sum(self.kept(ids, segments))

    def kept(self, ids: Tensor | Sequence[Hashable], segments: Sequence[Segment]) -> list[bool]:
        """Which of these samples are kept behind one of the segments."""
        tokens = [np.uint64(segment.boundary.token) for segment in segments]
        rows = self._index.find(digests(as_ids(ids)))
        return [bool(known) for known in np.isin(self._index.tokens(rows), tokens)]

    # For datasets: what need not be loaded

    def let_skip(self, segments: Sequence[Segment]) -> None:
        """Datasets need no longer load inputs of samples that are kept behind these segments."""
        self._index.let_read([segment.boundary.token for segment in segments])

    def can_skip(self, ids: Sequence[Hashable]) -> list[bool]:
        """Whether the inputs of these samples need not be loaded; fetches them from disk ahead."""
        rows = self._index.find(digests(ids))
        known = self._index.is_readable(rows)
        self.prefetch_rows(rows[known])
        return [bool(one) for one in known]

    def prefetch(self, ids: Sequence[Hashable]) -> None:
        """Samples that are wanted soon: what lies on disk is fetched beside other work."""
        rows = self._index.find(digests(ids))
        self.prefetch_rows(rows[self._index.tokens(rows) > 1])

    def prefetch_rows(self, rows: Numbers) -> None:
        """The same for rows of the table."""
        disk = self._arenas[1]
        if disk is None or not len(rows):
            return
        for token in np.unique(self._index.tokens(rows)).tolist():
            layout = self._index.noted(token)
            if layout is not None:
                chosen = rows[self._index.tokens(rows) == np.uint64(token)]
                self._expect(self._index.places(chosen), layout.size)

    def keep_rest(self, sample: Hashable, data: bytes) -> None:
        """Keep what a dataset gave besides the inputs of a sample, if there is space."""
        size = _aligned(len(data) + 8)
        rows = self._index.reserve(digests([sample], "rest"), size, self._arenas)
        if rows[0] >= 0:
            stored = len(data).to_bytes(8, "little") + data
            self._store(rows, torch.frombuffer(bytearray(stored), dtype=torch.uint8)[None])
            self._index.commit(rows, _REST)

    def rest(self, sample: Hashable) -> bytes | None:
        """What :meth:`keep_rest` has kept; None if it has not."""
        rows = self._index.find(digests([sample], "rest"))
        if self._index.tokens(rows)[0] != _REST:
            return None
        place = int(self._index.places(rows)[0])
        arena = self._arenas[place & 1]
        assert arena is not None
        start = place >> 1
        length = int(arena.memory[start : start + 8].view(torch.int64)[0])
        return arena.memory[start + 8 : start + 8 + length].numpy().tobytes()

    def forget(self) -> None:
        """Let the system drop its copies of what lies on disk: for measurements."""
        if self._arenas[1] is not None:
            self._arenas[1].forget()

    def close(self) -> None:
        """Let go; with the last process, all that was kept is gone. Twice is fine."""
        self._finalizer()

    def __repr__(self) -> str:
        memory, disk = map(megabytes, self.num_bytes)
        return f"ActivationCache({memory} in memory, {disk} on disk, {self.counts})"


def _close(index: Index, arenas: Sequence[Arena | None]) -> None:
    index.close()
    for arena in arenas:
        if arena is not None:
            arena.close()


def _aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _assembled(parts: Sequence[tuple[Numbers, Any]]) -> Any:
    """One batch of groups of its samples."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.from_numpy(np.argsort(np.concatenate([members for members, _ in parts])))

    def merged(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return torch.cat(leaves)[order.to(leaves[0].device)]

    return pytree.tree_map(merged, *(value for _, value in parts))
