"""The index of the cache: one table in shared memory, the same for all processes of a machine.

An entry may be read once its boundary's number is set, which is written last, by one atomic store.
So an entry that a process was writing when it ended does not exist::

    insert ──► boundary 0, place known ──► bytes are copied ──► commit: boundary = its number
                 (nobody reads it)                               (everybody may)
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tspipe.caching.arena import Arena, ArenaHandle
from lightning_tspipe.caching.keys import Words
from lightning_tspipe.errors import ConfigurationError

Numbers = NDArray[np.int64]
Tokens = NDArray[np.uint64]

_HEADER = 64 * 1024
_NUM_WORDS = 32
_MAX_READABLE = 256
_NEXT, _NOTES, _NUM_READABLE, _WAS_READABLE = 0, 8, 16, 24
"""Words of the header: first free bytes of up to 8 arenas; size of notes; readable tokens."""
NOWHERE = -1
UNKNOWN = np.uint64(0)


class Index:
    """Finds entries by sample, and allocates space for them.

    Args:
        arena: The table's own, made by :meth:`create` or attached to that of another process.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        memory = arena.memory.numpy()
        self._header = memory[: 8 * _NUM_WORDS].view(np.int64)
        readable = 8 * _NUM_WORDS
        self._readable = memory[readable : readable + 8 * _MAX_READABLE].view(np.uint64)
        self._notes = memory[readable + 8 * _MAX_READABLE : _HEADER]
        self._known: dict[int, Any] = {}
        self._num_read = 0
        capacity = (arena.size - _HEADER) // 40
        self._capacity = capacity
        table = memory[_HEADER : _HEADER + 40 * capacity].view(np.uint64).reshape(5, capacity)
        self._first, self._second, self._token = table[0], table[1], table[2]
        self._place, self._size = table[3].view(np.int64), table[4].view(np.int64)

    @classmethod
    def create(cls, num_entries: int) -> Index:
        """Make a table for a number of entries."""
        capacity = 1 << max(6, (2 * num_entries - 1).bit_length())
        arena = Arena.in_memory(_HEADER + 40 * capacity)
        if not arena.claim(arena.size):
            arena.close()
            raise ConfigurationError(
                f"no memory for a table of {num_entries} cached activations: is num_samples right?"
            )
        return cls(arena)

    @classmethod
    def attached(cls, handle: ArenaHandle) -> Index:
        """Attach to the table of another process."""
        return cls(Arena.attached(handle))

    @property
    def handle(self) -> ArenaHandle:
        """Argument of :meth:`attached`."""
        return self._arena.handle

    def find(self, words: Words) -> Numbers:
        """The row of each entry in the table, committed or not; -1 if there is none.

        Args:
            words: Digests of the samples, shape (samples, 2).
        """
        rows = (words[:, 0] % np.uint64(self._capacity)).astype(np.int64)
        found = np.full(len(words), -1, np.int64)
        open_ = np.arange(len(words))
        for _ in range(self._capacity):
            if not open_.size:
                break
            at = rows[open_]
            same = (self._first[at] == words[open_, 0]) & (self._second[at] == words[open_, 1])
            found[open_[same]] = at[same]
            open_ = open_[~same & (self._first[at] != 0)]
            rows[open_] = (rows[open_] + 1) % self._capacity
        return found

    def tokens(self, rows: Numbers) -> Tokens:
        """The boundary of the entry in each row; 0 if there is no committed entry."""
        found: Tokens = np.where(rows >= 0, self._token[np.maximum(rows, 0)], UNKNOWN)
        return found

    def places(self, rows: Numbers) -> Numbers:
        """Places of entries: twice the byte in their arena, plus the number of the arena."""
        places: Numbers = self._place[rows]
        return places

    def reserve(self, words: Words, size: int, arenas: Sequence[Arena | None]) -> Numbers:
        """Give each sample a row and space for an entry; its earlier entry is lost.

        Args:
            words: Digests of the samples, shape (samples, 2).
            size: Bytes of each entry.
            arenas: Arenas to use, the best first; None for one that is not to be used.

        Returns:
            The rows; -1 for samples for which there is no space.

        Raises:
            ConfigurationError: There are more samples than ``num_samples``.
        """
        with self._arena.locked():
            rows = self.find(words)
            for missing in np.flatnonzero(rows < 0):
                rows[missing] = self._insert(words[missing])
            for number, row in enumerate(rows.tolist()):
                self._token[row] = 0
                if self._size[row] < size and not self._allocate(row, size, arenas):
                    rows[number] = -1
        return rows

    def _insert(self, words: Words) -> int:
        row = int(words[0] % np.uint64(self._capacity))
        for _ in range(self._capacity // 4 * 3):
            if self._first[row] == 0:
                self._token[row], self._size[row], self._place[row] = 0, 0, NOWHERE
                self._second[row] = words[1]
                self._first[row] = words[0]
                return row
            row = (row + 1) % self._capacity
        raise ConfigurationError(
            "more sample ids than the cache was made for: the id of a sample must be the same in "
            "every epoch, and num_samples must be the length of the dataset. WithIds(dataset) "
            "numbers the samples"
        )

    def _allocate(self, row: int, size: int, arenas: Sequence[Arena | None]) -> bool:
        for number, arena in enumerate(arenas):
            start = int(self._header[_NEXT + number])
            if arena is not None and arena.claim(start + size):
                self._header[_NEXT + number] = start + size
                self._place[row], self._size[row] = 2 * start + number, size
                return True
        return False

    def commit(self, rows: Numbers, token: int) -> None:
        """Let the entries in these rows be read."""
        self._token[rows] = np.uint64(token)

    # Notes: few and small; the format of the entries at each boundary

    def note(self, token: int, value: Any) -> None:
        """Publish something about a boundary to all processes, once."""
        if self.noted(token) is not None:
            return
        with self._arena.locked():
            data = pickle.dumps((token, value))
            start = int(self._header[_NOTES])
            if start + len(data) + 8 > len(self._notes):
                raise ConfigurationError("too many boundaries for one cache of activations")
            self._notes[start : start + 8].view(np.int64)[0] = len(data)
            self._notes[start + 8 : start + 8 + len(data)] = np.frombuffer(data, np.uint8)
            self._header[_NOTES] = (start + 8 + len(data) + 7) // 8 * 8

    def noted(self, token: int) -> Any:
        """Read what some process published about a boundary; None if none has."""
        while token not in self._known and self._num_read < int(self._header[_NOTES]):
            start = self._num_read
            length = int(self._notes[start : start + 8].view(np.int64)[0])
            known, value = pickle.loads(self._notes[start + 8 : start + 8 + length].tobytes())  # noqa: S301 - a process of this job wrote it
            self._known.setdefault(known, value)
            self._num_read = (start + 8 + length + 7) // 8 * 8
        return self._known.get(token)

    # Entries that are read instead of inputs

    def let_read(self, tokens: Sequence[int]) -> None:
        """Let entries of these boundaries, and of no others, be read instead of inputs."""
        with self._arena.locked():
            if tokens:
                self._header[_WAS_READABLE] = 1
            self._header[_NUM_READABLE] = 0
            self._readable[: len(tokens)] = np.array(tokens, np.uint64)
            self._header[_NUM_READABLE] = len(tokens)

    @property
    def may_lack_inputs(self) -> bool:
        """Whether inputs may have been left out, since entries are or were read instead."""
        return bool(self._header[_WAS_READABLE])

    def is_readable(self, rows: Numbers) -> NDArray[np.bool_]:
        """Whether the entry of each row is read instead of its sample's input."""
        readable = self._readable[: int(self._header[_NUM_READABLE])]
        return np.isin(self.tokens(rows), readable) & (rows >= 0)

    def used(self, number: int) -> int:
        """Bytes of an arena that are in use."""
        return int(self._header[_NEXT + number])

    def close(self) -> None:
        """Close the table; twice is fine."""
        self._arena.close()
