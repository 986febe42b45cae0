"""Checksums of checkpoints: made when files are written, compared when they are read.

A file of a folder is summed in blocks, so that a rank compares what it reads and no more, and so
that a message can tell where a file is damaged. The table lies beside the files::

    checksums.json    {"version": 1,
                       "files": {"__0_0.distcp": {"size": 2700000, "blocks": "1f0e2c77 03c1a9d2"},
                                 ".metadata": ..., "meta.pt": ...},
                       "crc32": of "files"}

A single file of ``torch.save`` is a zip archive, with a CRC-32 for each record: the structure, and
each storage. torch writes them and never looks at them.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

TABLE_FILE = "checksums.json"
BLOCK = 2**20
"""Bytes that have a checksum of their own."""
_VERSION = 1
_IS_FOLDER = 0x10  # of the attributes of a record


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


def sums_of(path: Path) -> Sums:
    """Of a file that was just written."""
    with path.open("rb") as file:
        blocks = tuple(map(zlib.crc32, iter(lambda: file.read(BLOCK), b"")))
        return Sums(file.tell(), blocks)


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


# Single files


def is_archive(path: Path) -> bool:
    """Whether a path is that of an archive, be it damaged; one that was cut off is none."""
    if not path.is_file():
        return False
    try:
        return zipfile.is_zipfile(path)
    except (zipfile.BadZipFile, ValueError, OverflowError):
        return True


def compare_records(path: Path) -> bool:
    """Read an archive once, and compare; the memory it takes is small, however large the file is.

    Returns:
        Whether it has checksums; without (``torch.serialization.set_crc32_options(False)``),
        nothing was compared.

    Raises:
        DamageError: Something differs from what was written.
    """
    with _damage("its table of contents can't be read"), zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if all(record.CRC == 0 for record in records):
            return False
        for record in records:
            with _damage(f"the record {record.orig_filename!r} differs from what was written"):
                _compare(archive, record)
    return True


def _compare(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record to its end, where its checksum is compared."""
    # torch takes what has the attribute of a folder for empty, and leaves memory as it was.
    is_folder = record.external_attr & _IS_FOLDER
    is_packed = record.compress_type != zipfile.ZIP_STORED
    if is_folder or is_packed or record.compress_size != record.file_size:
        raise zipfile.BadZipFile("it is stored otherwise than torch does it")
    with archive.open(record) as content:
        while content.read(BLOCK):
            pass


@contextmanager
def _damage(what: str) -> Iterator[None]:
    """Whatever the reader of archives says of one that is damaged has no common type."""
    try:
        yield
    except (DamageError, PermissionError):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        raise DamageError(f"{what} ({error})") from None
