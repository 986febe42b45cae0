"""Storage of the cache: a table, and the memory and disk space that its rows point into.

All processes of a machine see the same. An entry may be read once the token of its boundary is set,
which is written last, by one atomic store; so an entry that a process was writing when it ended
does not exist::

    table    row 0   digest of a sample   token of a boundary   place ──┐
             row 1   ...                                                │
    memory   [ entry ][ entry ][ entry ] ◄──────────────────────────────┘
    disk     [ entry ][ entry ] ...
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_tspipe.caching.arena import Arena, ArenaHandle
from lightning_tspipe.caching.entries import Layout, Numbers, join, layout_of, rows_of, split
from lightning_tspipe.caching.keys import Boundary, Words, digests
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import Late

StoreHandle = tuple[ArenaHandle | None, ...]
"""Address of a store for the other processes of a machine: of its table, memory and disk."""
_ROW = np.dtype(
    [
        ("first", np.uint64),  # of the two words of the sample's digest; 0: a free row
        ("second", np.uint64),
        ("token", np.uint64),  # 0: no entry that can be read
        ("place", np.int64),  # twice the byte in an arena, plus 1 on disk
        ("size", np.int64),  # bytes that are allocated there
    ]
)
_HEADER = 64 * 1024
_REST = 1
"""The token of the parts of a sample that are not inputs."""
_ALIGNMENT = 64


@dataclass
class _Notes:
    """What all processes know besides the table: little, and rarely changed.

    Attributes:
        layouts: The format of entries by their token.
        readable: Tokens of the entries that are read instead of inputs.
        may_lack_inputs: Whether entries are or were read instead of inputs.
    """

    layouts: dict[int, Layout] = field(default_factory=dict)
    readable: Sequence[int] = ()
    may_lack_inputs: bool = False


def new_table(num_entries: int) -> Arena:
    """Make empty space for a table.

    Args:
        num_entries: Largest number of entries.

    Raises:
        ConfigurationError: That is more than what is free.
    """
    table = Arena.in_memory(_HEADER + max(64, 2 * num_entries) * _ROW.itemsize)
    if not table.claim(table.size):
        table.close()
        raise ConfigurationError(
            f"no memory for a table of {num_entries} cached activations: is num_samples right?"
        )
    return table


def _close(arenas: Sequence[Arena | None]) -> None:
    for arena in arenas:
        if arena is not None:
            arena.close()


class Store:
    """Entries of samples in shared space, found by a table.

    Args:
        table: Space for the table.
        memory: Space in memory.
        disk: Space on disk, used when the memory is full.
    """

    def __init__(self, table: Arena, memory: Arena | None, disk: Arena | None) -> None:
        self._table = table
        self._arenas = (memory, disk)
        self._in_use: Sequence[Arena | None] = self._arenas
        self._under_way: tuple[Numbers, Late, int] | None = None  # rows, their bytes, their token
        header = table.memory.numpy()[:_HEADER]
        words = header[:64].view(np.int64)
        self._version, self._used = words[:1], words[1:3]
        self._notes = header[64:].reshape(2, -1)
        num_rows = (table.size - _HEADER) // _ROW.itemsize
        self._rows = table.memory.numpy()[_HEADER:][: num_rows * _ROW.itemsize].view(_ROW)
        self._layouts: dict[int, Layout] = {}
        self._finalizer = weakref.finalize(self, _close, (table, memory, disk))

    @property
    def handle(self) -> StoreHandle:
        """Argument of ``attach`` in another process, valid while this one lives."""
        arenas = (self._table, *self._arenas)
        return tuple(None if arena is None else arena.handle for arena in arenas)

    def use(self, *, memory: bool, disk: bool) -> None:
        """Choose where this process stores further activations."""
        pairs = zip(self._arenas, (memory, disk), strict=True)
        self._in_use = [arena if wanted else None for arena, wanted in pairs]

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Used bytes of memory and disk, by all processes."""
        return int(self._used[0]), int(self._used[1])

    # The table

    def find(self, words: Words) -> Numbers:
        """The row of each entry in the table, whether it can be read or not; -1 if there is none.

        Args:
            words: Digests of the samples, shape (samples, 2).
        """
        rows = (words[:, 0] % np.uint64(len(self._rows))).astype(np.int64)
        found = np.full(len(words), -1, np.int64)
        open_ = np.arange(len(words))
        for _ in range(len(self._rows)):
            if not open_.size:
                break
            at = self._rows[rows[open_]]
            same = (at["first"] == words[open_, 0]) & (at["second"] == words[open_, 1])
            found[open_[same]] = rows[open_[same]]
            open_ = open_[~same & (at["first"] != 0)]
            rows[open_] = (rows[open_] + 1) % len(self._rows)
        return found

    def tokens(self, rows: Numbers) -> NDArray[np.uint64]:
        """The boundary of the entry in each row; 0 if there is no entry that can be read."""
        found = self._rows["token"][np.maximum(rows, 0)]
        found[rows < 0] = 0
        return found

    def commit(self, rows: Numbers, token: int) -> None:
        """Let the entries in these rows be read."""
        self._rows["token"][rows] = np.uint64(token)

    def _reserve(self, words: Words, size: int, arenas: Sequence[Arena | None]) -> Numbers:
        """Give each sample a row and space for an entry; its earlier entry is lost.

        Args:
            words: Digests of the samples, shape (samples, 2).
            size: Bytes of each entry.
            arenas: Memory and disk, where they are to be used.

        Returns:
            The rows; -1 for samples for which there is no space.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._table.locked():
            rows = self.find(words)
            for missing in np.flatnonzero(rows < 0):
                rows[missing] = self._insert(words[missing])
            self.commit(rows, 0)
            for number, row in enumerate(rows.tolist()):
                if self._rows["size"][row] < size and not self._allocate(row, size, arenas):
                    rows[number] = -1
        return rows

    def _insert(self, words: Words) -> int:
        row = int(words[0] % np.uint64(len(self._rows)))
        for _ in range(len(self._rows) // 4 * 3):
            if self._rows["first"][row] == 0:
                self._rows["second"][row] = words[1]
                self._rows["first"][row] = words[0]
                return row
            row = (row + 1) % len(self._rows)
        raise ConfigurationError(
            "more sample ids than the cache was made for: the id of a sample must be the same in "
            "every epoch, and num_samples must be the length of the dataset. WithIds(dataset) "
            "numbers the samples"
        )

    def _allocate(self, row: int, size: int, arenas: Sequence[Arena | None]) -> bool:
        for number, arena in enumerate(arenas):
            start = int(self._used[number])
            if arena is not None and arena.claim(start + size):
                self._used[number] = start + size
                self._rows["place"][row], self._rows["size"][row] = 2 * start + number, size
                return True
        return False

    # What all processes know besides

    def _known(self) -> _Notes:
        while True:
            version = int(self._version[0])
            if version == 0:
                return _Notes()
            data = self._notes[version % 2].tobytes()
            if version == self._version[0]:  # else another process may have written into it
                notes: _Notes = pickle.loads(data)  # noqa: S301 - a process of this job wrote it
                return notes

    def _publish(self, notes: _Notes) -> None:
        """Write beside what is valid, which remains if this process ends meanwhile."""
        data = np.frombuffer(pickle.dumps(notes), np.uint8)
        into = self._notes[(int(self._version[0]) + 1) % 2]
        if len(data) > len(into):
            raise ConfigurationError("too many boundaries for one cache of activations")
        into[: len(data)] = data
        self._version += 1

    def _layout(self, token: int) -> Layout | None:
        """The format of the entries with a token; None if no process has stored one."""
        if token not in self._layouts:
            self._layouts = self._known().layouts
        return self._layouts.get(token)

    @property
    def may_lack_inputs(self) -> bool:
        """Whether a dataset may have left out inputs; only then they must be checked."""
        return self._known().may_lack_inputs

    # Entries

    def read_rows(self, rows: Numbers, boundary: Boundary, device: torch.device | None) -> Any:
        """The entries in some rows; None if one of them is not there, or changes meanwhile."""
        token = boundary.token
        layout = self._layout(token)
        if layout is None or (self.tokens(rows) != np.uint64(token)).any():
            return None
        data = torch.empty(len(rows), layout.size, dtype=torch.uint8)
        self.prefetch_rows(rows)
        for entry, row in zip(data, rows, strict=True):
            entry.copy_(self._bytes(row)[: layout.size])
        if (self.tokens(rows) != np.uint64(token)).any():
            return None
        return split(data, layout, device)

    def write(self, words: Words, value: Any, boundary: Boundary) -> int:
        """Store the outputs of samples at a boundary; returns for how many there was space.

        What a GPU is still computing is stored later, see :meth:`settle`.

        Raises:
            ConfigurationError: An entry would have another format than those before.
        """
        self.settle()
        layout, token = layout_of(value, len(words), boundary.dtype), boundary.token
        if self._layout(token) is None:
            with self._table.locked():
                notes = self._known()
                notes.layouts.setdefault(token, layout)
                self._publish(notes)
        known = self._layout(token)
        if known != layout:
            raise ConfigurationError(
                f"the activations of one sample at {boundary.name!r} are {layout}, those of "
                f"another {known}, and the cache needs one shape. Pad all inputs to one length"
            )
        rows = self._reserve(words, layout.size, self._in_use)
        kept = np.flatnonzero(rows >= 0)
        if len(kept):
            value = value if len(kept) == len(rows) else rows_of(value, kept)
            data = Late(join(value, layout))
            self._under_way = rows[kept], data, token
            if data.is_there:
                self.settle()
        return len(kept)

    def settle(self, rows: Numbers | None = None) -> None:
        """Store what was on its way to the host; waits until it has arrived.

        Args:
            rows: Only if it belongs to one of these rows; None: in any case.
        """
        if self._under_way is None:
            return
        own, data, token = self._under_way
        if rows is None or np.isin(own, rows).any():
            self._under_way = None
            self._put(own, data.on_host())
            self.commit(own, token)

    def prefetch_rows(self, rows: Numbers) -> None:
        """Prefetch the entries of these rows from disk, in the background."""
        disk = self._arenas[1]
        if disk is not None:
            for place, size in self._rows[["place", "size"]][rows].tolist():
                if place & 1:
                    disk.expect(place >> 1, size)

    def keep_rest(self, sample: Hashable, rest: Any) -> None:
        """Store the parts of a sample that are not inputs, if there is space."""
        data = torch.frombuffer(bytearray(pickle.dumps(rest)), dtype=torch.uint8)
        rows = self._reserve(digests([sample], "rest"), len(data), self._arenas)
        if rows[0] >= 0:
            self._put(rows, data[None])
            self.commit(rows, _REST)

    def rest(self, sample: Hashable) -> Any:
        """Read what :meth:`keep_rest` has stored; None if nothing."""
        rows = self.find(digests([sample], "rest"))
        if self.tokens(rows)[0] != _REST:
            return None
        return pickle.loads(self._bytes(rows[0]).numpy().tobytes())  # noqa: S301 - as above

    def forget(self) -> None:
        """Drop the page cache of what is on disk, for measurements."""
        if self._arenas[1] is not None:
            self._arenas[1].forget()

    def close(self) -> None:
        """Close it; its contents are lost with the last process. Twice is fine."""
        self._under_way = None
        self._finalizer()

    def _put(self, rows: Numbers, data: Tensor) -> None:
        """Copy bytes, shape (entries, bytes), to the places of their rows."""
        for entry, row in zip(data, rows, strict=True):
            self._bytes(row)[: len(entry)] = entry

    def _bytes(self, row: int) -> Tensor:
        """The bytes that are allocated for the entry of a row."""
        place, size = int(self._rows["place"][row]), int(self._rows["size"][row])
        arena = self._arenas[place & 1]
        assert arena is not None
        return arena.memory[place >> 1 : (place >> 1) + size]
