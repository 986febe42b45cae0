"""Storage of the cache: a table, and the memory and disk space that its rows point into.

All processes of a machine see the same. What a row points to is whole, or the row says that there
is nothing: its token is written last::

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
"""The token of what a dataset keeps of a sample besides its inputs."""
_ALIGNMENT = 64


class StoreHandle(NamedTuple):
    """Where the other processes of a machine find a store; small, and can be pickled."""

    table: ArenaHandle
    memory: ArenaHandle | None
    disk: ArenaHandle | None


class _UnderWay(NamedTuple):
    """Entries that are reserved, and whose bytes a device still computes."""

    rows: Numbers
    data: Late
    token: int


class Store:
    """Entries of samples, by the rows of a table.

    Args:
        table: Says what lies where.
        memory: Space in memory.
        disk: Space on disk, used when there is none in memory.

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
        """An empty one.

        Args:
            num_rows: Of the table.
            memory: Bytes of memory.
            disk: Bytes on disk.
            folder: On the file system to use; None: the system's temporary one.

        Raises:
            ConfigurationError: More than there is.
        """
        return cls(
            Index.create(num_rows),
            Arena.in_memory(memory) if memory else None,
            Arena.on_disk(folder, disk) if disk else None,
        )

    @classmethod
    def attached(cls, handle: StoreHandle) -> Store:
        """That of another process.

        Raises:
            ConfigurationError: It can't be reached.
        """
        memory, disk = (None if part is None else Arena.attached(part) for part in handle[1:])
        return cls(Index.attached(handle.table), memory, disk)

    @property
    def handle(self) -> StoreHandle:
        """For :meth:`attached`, while this process lives."""
        memory, disk = (None if arena is None else arena.handle for arena in self._arenas)
        return StoreHandle(self.table.handle, memory, disk)

    def use(self, *, memory: bool, disk: bool) -> None:
        """Where further entries are put, by this process."""
        self._in_use = [
            arena if wanted else None
            for arena, wanted in zip(self._arenas, (memory, disk), strict=True)
        ]

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Used bytes of memory and disk, by all processes."""
        return self.table.used(0), self.table.used(1)

    def note(self, token: int, layout: Layout) -> Layout:
        """How entries with a token are laid out: as said here, or by another process before."""
        self.table.note(token, layout)
        noted: Layout = self.table.noted(token)
        return noted

    def read(self, rows: Numbers, token: int) -> tuple[Tensor, Layout] | None:
        """The entries in some rows; None if one of them changed meanwhile."""
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
        """Put what a batch of samples gave; for how many there was space.

        What a GPU has yet to compute is put there when it has, see :meth:`settle`.
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
        """Put what was under way to the host; holds the host until it is there.

        Args:
            rows: Only if it goes to one of these; None: in any case.
        """
        found = self._under_way
        if found is not None and (rows is None or np.isin(found.rows, rows).any()):
            self._under_way = None
            self._put(found.rows, found.data.on_host())
            self.table.commit(found.rows, found.token)

    def prefetch(self, rows: Numbers) -> None:
        """What lies on disk of these rows is fetched beside other work."""
        if self._arenas[1] is None or not len(rows):
            return
        for token in np.unique(self.table.tokens(rows)).tolist():
            layout = self.table.noted(token)
            if layout is not None:
                chosen = rows[self.table.tokens(rows) == np.uint64(token)]
                self._expect(self.table.places(chosen), layout.size)

    def keep_rest(self, sample: Hashable, data: bytes) -> None:
        """Keep what a dataset gave besides the inputs of a sample, if there is space."""
        size = _aligned(len(data) + 8)
        rows = self.table.reserve(digests([sample], "rest"), size, self._arenas)
        if rows[0] >= 0:
            stored = len(data).to_bytes(8, "little") + data
            self._put(rows, torch.frombuffer(bytearray(stored), dtype=torch.uint8)[None])
            self.table.commit(rows, _REST)

    def rest(self, sample: Hashable) -> bytes | None:
        """What :meth:`keep_rest` has kept; None if it has not."""
        rows = self.table.find(digests([sample], "rest"))
        if self.table.tokens(rows)[0] != _REST:
            return None
        place = int(self.table.places(rows)[0])
        length = int(self._bytes(place, 8).view(torch.int64)[0])
        return self._bytes(place, 8 + length)[8:].numpy().tobytes()

    def forget(self) -> None:
        """Let the system drop its copies of what lies on disk: for measurements."""
        if self._arenas[1] is not None:
            self._arenas[1].forget()

    def close(self) -> None:
        """Let go; with the last process, all that was kept is gone. Twice is fine."""
        self._under_way = None
        self.table.close()
        for arena in self._arenas:
            if arena is not None:
                arena.close()

    def _put(self, rows: Numbers, data: Tensor) -> None:
        """Copy bytes, shape (entries, bytes), to where their rows say."""
        for entry, place in zip(data, self.table.places(rows).tolist(), strict=True):
            self._bytes(place, data.shape[1]).copy_(entry)

    def _bytes(self, place: int, size: int) -> Tensor:
        """The lowest bit of a place says in which arena it is."""
        arena = self._arenas[place & 1]
        assert arena is not None
        return arena.memory[place >> 1 : (place >> 1) + size]

    def _expect(self, places: Numbers, size: int) -> None:
        disk = self._arenas[1]
        if disk is not None:
            disk.expect([place >> 1 for place in places.tolist() if place & 1], size)


def _aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
