"""Storage of the cache: a table, and the memory and disk space that its rows point into.

All processes of a machine see the same. A row's token is written last, so that an entry is either
complete or missing::

    table    row 0   digest of a sample   token of a boundary   place ──┐
             row 1   ...                                                │
    memory   [ entry ][ entry ][ entry ] ◄──────────────────────────────┘
    disk     [ entry ][ entry ] ...
"""

from __future__ import annotations

from collections.abc import Hashable
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_tspipe.caching.arena import Arena, ArenaHandle
from lightning_tspipe.caching.entries import Layout, join, rows_of
from lightning_tspipe.caching.index import Index, Numbers
from lightning_tspipe.caching.keys import digests
from lightning_tspipe.late import Late

_REST = 1
"""The token of the parts of a sample that are not inputs."""
_ALIGNMENT = 64


class StoreHandle(NamedTuple):
    """Address of a store for the other processes of a machine; small and picklable."""

    table: ArenaHandle
    memory: ArenaHandle | None
    disk: ArenaHandle | None


class _UnderWay(NamedTuple):
    """Entries with reserved space whose bytes a device is still computing."""

    rows: Numbers
    data: Late
    token: int


class Store:
    """Entries of samples, by the rows of a table.

    Args:
        table: The index of all entries.
        memory: Space in memory.
        disk: Space on disk, used when the memory is full.

    Attributes:
        table: The table.
    """

    def __init__(self, table: Index, memory: Arena | None, disk: Arena | None) -> None:
        self.table = table
        self._arenas = (memory, disk)
        self._in_use: list[Arena | None] = [memory, disk]
        self._under_way: _UnderWay | None = None

    @classmethod
    def create(
        cls, num_rows: int, memory: int, disk: int, folder: str | PathLike[str] | None
    ) -> Store:
        """Make an empty store.

        Args:
            num_rows: Rows of the table.
            memory: Bytes of memory.
            disk: Bytes on disk.
            folder: A folder on the file system to use; None: the temporary folder.

        Raises:
            ConfigurationError: That is more than what is free.
        """
        return cls(
            Index.create(num_rows),
            Arena.in_memory(memory) if memory else None,
            Arena.on_disk(folder, disk) if disk else None,
        )

    @classmethod
    def attached(cls, handle: StoreHandle) -> Store:
        """Attach to the store of another process.

        Raises:
            ConfigurationError: It can't be reached.
        """
        memory, disk = (None if part is None else Arena.attached(part) for part in handle[1:])
        return cls(Index.attached(handle.table), memory, disk)

    @property
    def handle(self) -> StoreHandle:
        """Argument of :meth:`attached`, valid while this process lives."""
        memory, disk = (None if arena is None else arena.handle for arena in self._arenas)
        return StoreHandle(self.table.handle, memory, disk)

    def use(self, *, memory: bool, disk: bool) -> None:
        """Choose where this process puts further entries."""
        self._in_use = [
            arena if wanted else None
            for arena, wanted in zip(self._arenas, (memory, disk), strict=True)
        ]

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Used bytes of memory and disk, by all processes."""
        return self.table.used(0), self.table.used(1)

    def note(self, token: int, layout: Layout) -> Layout:
        """Publish the format of entries with a token; returns the one that was published first."""
        self.table.note(token, layout)
        noted: Layout = self.table.noted(token)
        return noted

    def read(self, rows: Numbers, token: int) -> tuple[Tensor, Layout] | None:
        """The entries in some rows; None if one of them has changed meanwhile."""
        layout: Layout | None = self.table.noted(token)
        if layout is None:
            return None
        data = torch.empty(len(rows), layout.size, dtype=torch.uint8)
        places = self.table.places(rows)
        self._expect(places, layout.size)
        for into, place in zip(data, places.tolist(), strict=True):
            into.copy_(self._bytes(place, layout.size))
        if (self.table.tokens(rows) != np.uint64(token)).any():
            return None
        return data, layout

    def write(self, words: Any, value: Any, layout: Layout, token: int) -> int:
        """Store the outputs of samples; returns for how many there was space.

        What a GPU is still computing is stored later, see :meth:`settle`.
        """
        self.settle()
        rows = self.table.reserve(words, _aligned(layout.size), self._in_use)
        kept = np.flatnonzero(rows >= 0)
        if not len(kept):
            return 0
        if len(kept) < len(rows):
            value = rows_of(value, kept)
        self._under_way = _UnderWay(rows[kept], Late(join(value, layout)), token)
        if self._under_way.data.is_there:
            self.settle()
        return len(kept)

    def settle(self, rows: Numbers | None = None) -> None:
        """Store what was on its way to the host; waits until it has arrived.

        Args:
            rows: Only if it belongs to one of these rows; None: in any case.
        """
        found = self._under_way
        if found is not None and (rows is None or np.isin(found.rows, rows).any()):
            self._under_way = None
            self._put(found.rows, found.data.on_host())
            self.table.commit(found.rows, found.token)

    def prefetch(self, rows: Numbers) -> None:
        """Prefetch the entries of these rows from disk, in the background."""
        if self._arenas[1] is None or not len(rows):
            return
        for token in np.unique(self.table.tokens(rows)).tolist():
            layout = self.table.noted(token)
            if layout is not None:
                chosen = rows[self.table.tokens(rows) == np.uint64(token)]
                self._expect(self.table.places(chosen), layout.size)

    def keep_rest(self, sample: Hashable, data: bytes) -> None:
        """Store the parts of a sample that are not inputs, if there is space."""
        size = _aligned(len(data) + 8)
        rows = self.table.reserve(digests([sample], "rest"), size, self._arenas)
        if rows[0] >= 0:
            stored = len(data).to_bytes(8, "little") + data
            self._put(rows, torch.frombuffer(bytearray(stored), dtype=torch.uint8)[None])
            self.table.commit(rows, _REST)

    def rest(self, sample: Hashable) -> bytes | None:
        """Read what :meth:`keep_rest` has stored; None if nothing."""
        rows = self.table.find(digests([sample], "rest"))
        if self.table.tokens(rows)[0] != _REST:
            return None
        place = int(self.table.places(rows)[0])
        length = int(self._bytes(place, 8).view(torch.int64)[0])
        return self._bytes(place, 8 + length)[8:].numpy().tobytes()

    def forget(self) -> None:
        """Drop the page cache of what is on disk, for measurements."""
        if self._arenas[1] is not None:
            self._arenas[1].forget()

    def close(self) -> None:
        """Close the store; its contents are lost with the last process. Twice is fine."""
        self._under_way = None
        self.table.close()
        for arena in self._arenas:
            if arena is not None:
                arena.close()

    def _put(self, rows: Numbers, data: Tensor) -> None:
        """Copy bytes, shape (entries, bytes), to the places of their rows."""
        for entry, place in zip(data, self.table.places(rows).tolist(), strict=True):
            self._bytes(place, data.shape[1]).copy_(entry)

    def _bytes(self, place: int, size: int) -> Tensor:
        """The bytes at a place, whose lowest bit is the number of the arena."""
        arena = self._arenas[place & 1]
        assert arena is not None
        return arena.memory[place >> 1 : (place >> 1) + size]

    def _expect(self, places: Numbers, size: int) -> None:
        disk = self._arenas[1]
        if disk is not None:
            disk.expect([place >> 1 for place in places.tolist() if place & 1], size)


def _aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
