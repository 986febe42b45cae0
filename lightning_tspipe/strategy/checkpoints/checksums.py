"""Checksums of a folder's files: made while they are written, compared while they are read.

A file is summed in blocks, so that a rank compares what it reads and no more, and so that a
message can tell where a file is damaged. The table lies beside the files::

    checksums.json    {"version": 1,
                       "files": {"__0_0.distcp": {"size": 2700000, "blocks": "1f0e2c77 03c1a9d2"},
                                 ".metadata": ..., "meta.pt": ...},
                       "crc32": of "files"}
"""

from __future__ import annotations

import io
import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import Buffer, override

TABLE_FILE = "checksums.json"
BLOCK = 2**20
"""Bytes that have a checksum of their own."""
_KEPT_BLOCKS = 4
_VERSION = 1


class DamageError(Exception):
    """Bytes that differ from those that were written; says where."""


class Sums(NamedTuple):
    """What is known of a file.

    Attributes:
        size: In bytes.
        blocks: The CRC-32 of each ``BLOCK`` bytes; the last block may be shorter.
    """

    size: int
    blocks: tuple[int, ...]


class SummedStream:
    """A file that is written from its beginning to its end, and summed on the way.

    Args:
        file: What is written to.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._blocks: list[int] = []
        self._sum = self._filled = 0

    def write(self, data: Buffer) -> int:
        """Write bytes behind those that were written before."""
        view = memoryview(data).cast("B")
        length = len(view)
        self._file.write(view)
        while len(view):
            part = view[: BLOCK - self._filled]
            self._sum = zlib.crc32(part, self._sum)
            self._filled += len(part)
            if self._filled == BLOCK:
                self._blocks.append(self._sum)
                self._sum = self._filled = 0
            view = view[len(part) :]
        return length

    @property
    def sums(self) -> Sums:
        """Of what was written so far."""
        size = len(self._blocks) * BLOCK + self._filled
        last = (self._sum,) if self._filled else ()
        return Sums(size, (*self._blocks, *last))

    def tell(self) -> int:
        """Bytes written."""
        return self.sums.size

    def flush(self) -> None:
        """Hand over to the system what is kept here."""
        self._file.flush()

    def fileno(self) -> int:
        """The system's number of the file."""
        return int(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def sums_of(content: bytes) -> Sums:
    """Of a file with this content."""
    stream = SummedStream(io.BytesIO())
    stream.write(content)
    return stream.sums


def to_json(files: Mapping[str, Sums]) -> str:
    """The table of some files, with a checksum of its own."""
    table = {
        name: {"size": sums.size, "blocks": " ".join(f"{block:08x}" for block in sums.blocks)}
        for name, sums in sorted(files.items())
    }
    text = {"version": _VERSION, "files": table, "crc32": f"{_sum_of_table(table):08x}"}
    return json.dumps(text, indent=1)


def from_json(text: bytes) -> dict[str, Sums]:
    """The files of a table.

    Raises:
        DamageError: It differs from what :func:`to_json` wrote.
    """
    try:
        data = json.loads(text.decode("ascii"))
        if data["version"] != _VERSION:
            raise DamageError(f"it has version {data['version']!r}, and known is {_VERSION}")
        table = data["files"]
        if int(data["crc32"], 16) != _sum_of_table(table):
            raise DamageError("its checksum does not fit")
        return {
            name: Sums(entry["size"], tuple(int(block, 16) for block in entry["blocks"].split()))
            for name, entry in table.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamageError(f"it can't be parsed ({type(error).__name__})") from None


def _sum_of_table(table: Any) -> int:
    return zlib.crc32(json.dumps(table, sort_keys=True).encode("ascii"))


class BlockCache:
    """The last blocks that were compared: small pieces of a file often share one."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def get(self, key: tuple[str, int], read: Callable[[], bytes]) -> bytes:
        """A block, read if it is not kept."""
        if key not in self._kept:
            self._kept[key] = read()
            if len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


class Window(io.RawIOBase):
    """A part of a file, whose bytes are compared with their checksums when they are read.

    Args:
        path: The file.
        start: Where the part begins.
        length: In bytes.
        sums: Of the file; None: nothing is compared.
        cache: For blocks of which a part is read.

    Attributes:
        damage: What was found, also if a library reports it as something else.
    """

    def __init__(
        self, path: Path, start: int, length: int, sums: Sums | None, cache: BlockCache
    ) -> None:
        super().__init__()
        self._file = path.open("rb", buffering=0)
        self._name = path.name
        self._start, self._end = start, start + length
        self._place = start
        self._sums, self._cache = sums, cache
        self.damage: DamageError | None = None

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: self._start, io.SEEK_CUR: self._place, io.SEEK_END: self._end}
        self._place = max(self._start, origin[whence] + offset)
        return self.tell()

    @override
    def tell(self) -> int:
        return self._place - self._start

    @override
    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._end - self._place)]
        number = len(view)
        while len(view):
            done = self._read_some(view)
            if done == 0:
                return number - len(view)
            self._place += done
            view = view[done:]
        return number

    def _read_some(self, view: memoryview) -> int:
        """Read up to the end of a block; the number of bytes."""
        if self._sums is None:
            self._file.seek(self._place)
            return self._file.readinto(view) or 0
        number, within = divmod(self._place, BLOCK)
        size = min(BLOCK, self._sums.size - number * BLOCK)
        if within == 0 and len(view) >= size:
            # To its place at once: large tensors are not copied once more.
            self._read_block(number, view[:size])
            return size
        block = self._cache.get((self._name, number), lambda: self._block(number, size))
        part = block[within : within + len(view)]
        view[: len(part)] = part
        return len(part)

    def _block(self, number: int, size: int) -> bytes:
        content = bytearray(max(0, size))
        self._read_block(number, memoryview(content))
        return bytes(content)

    def _read_block(self, number: int, into: memoryview) -> None:
        assert self._sums is not None
        self._file.seek(number * BLOCK)
        rest = into
        while len(rest) and (done := self._file.readinto(rest)):
            rest = rest[done:]
        blocks = self._sums.blocks
        if len(rest) or number >= len(blocks) or zlib.crc32(into) != blocks[number]:
            first = number * BLOCK
            self.damage = DamageError(
                f"of its file {self._name!r}, bytes {first:,} to {first + len(into):,} differ from "
                "what was written"
            )
            raise self.damage

    @override
    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
