"""Compare the records of files of ``torch.save`` with the checksums in the file.

Such a file is a zip archive, with a CRC-32 for each record: the structure, and each storage. torch
writes them and never looks at them.
"""

from __future__ import annotations

import errno
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_tspipe.strategy.checkpoints.checksums import DamageError

_HEADER = struct.Struct("<4s5H3I2H")
_PIECE = 2**20
_IS_UTF8, _IS_ENCRYPTED = 0x800, 0x2041  # of the flags: three ways to say so
_IS_FOLDER = 0x10  # of the attributes


def is_archive(path: Path) -> bool:
    """Whether a path is that of an archive, be it damaged; one that was cut off is none."""
    if not path.is_file():
        return False
    try:
        with _wrong_table():
            return zipfile.is_zipfile(path)
    except DamageError:
        return True


def compare_records(path: Path) -> bool:
    """Read a file once, and compare.

    The memory it takes is small, however large the file is.

    Args:
        path: An archive.

    Returns:
        Whether it has checksums; without (``torch.serialization.set_crc32_options(False)``),
        nothing was compared.

    Raises:
        DamageError: Something differs from what was written.
    """
    with path.open("rb", buffering=0) as file:
        with _wrong_table():
            records = zipfile.ZipFile(file).infolist()
        if all(record.CRC == 0 for record in records):
            return False
        buffer = memoryview(bytearray(_PIECE))
        for record in records:
            with _wrong_table():
                is_right = _is_right(file, record) and (
                    _sum(file, record.file_size, buffer) == record.CRC
                )
            if not is_right:
                raise DamageError(
                    f"the record {record.orig_filename!r} differs from what was written"
                )
    return True


@contextmanager
def _wrong_table() -> Iterator[None]:
    """Numbers that are too large, or signatures that are not there."""
    try:
        yield
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as e:
        raise DamageError(f"its table of contents can't be read ({e})") from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # which the system says of a place that no file has
            raise
        raise DamageError("its table of contents points outside of it") from None


def _is_right(file: Any, record: zipfile.ZipInfo) -> bool:
    """Go to where a record begins; whether it is one as torch writes and reads it."""
    file.seek(record.header_offset)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or header[:4] != b"PK\x03\x04":
        return False
    *_, name_length, extra_length = _HEADER.unpack(header)
    name = record.orig_filename.encode("utf-8" if record.flag_bits & _IS_UTF8 else "cp437")
    is_same_name = file.read(name_length) == name
    file.seek(extra_length, 1)
    is_plain = record.compress_type == zipfile.ZIP_STORED and not record.flag_bits & _IS_ENCRYPTED
    # torch takes what has the attribute of a folder for empty, and leaves memory as it was.
    is_plain = is_plain and not record.external_attr & _IS_FOLDER
    return is_same_name and is_plain and record.compress_size == record.file_size


def _sum(file: Any, size: int, buffer: memoryview) -> int | None:
    """CRC-32 of the bytes that follow; None if there are fewer."""
    found = 0
    while size:
        done = file.readinto(buffer[: min(size, len(buffer))])
        if not done:
            return None
        found = zlib.crc32(buffer[:done], found)
        size -= done
    return found
