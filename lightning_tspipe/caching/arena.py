"""Anonymous shared space, in memory or on disk, for the processes of one machine.

The files have no names: the system takes them back when the last process that has them open ends,
however it ends. So there is nothing to clean up, and nothing that the next run could find.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_tspipe.errors import ConfigurationError

_STEP = 64 * 2**20
"""Bytes that are claimed from the system at a time."""


class ArenaHandle(NamedTuple):
    """Where another process of this machine and user finds an arena."""

    pid: int
    file: int
    size: int


class Arena:
    """A stretch of bytes that several processes have mapped.

    Nothing is claimed from the system before it is used, and what is claimed is there: a full disk
    is an answer, not a signal that ends the process.

    Attributes:
        memory: All its bytes, shape (size,).
        size: In bytes.
    """

    def __init__(self, file: int, size: int) -> None:
        self._file = file
        self.size = size
        self._map = mmap.mmap(file, size)
        self.memory: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._claimed = 0

    @classmethod
    def in_memory(cls, size: int) -> Arena:
        """Anonymous memory.

        Raises:
            ConfigurationError: The machine has less.
        """
        available = available_memory()
        if available is not None and size > available:
            raise ConfigurationError(
                f"a memory budget of {megabytes(size)} for cached activations, but the machine has "
                f"{megabytes(available)} left: lower it, or give a disk budget"
            )
        if not hasattr(os, "memfd_create"):  # not Linux
            return cls.on_disk(None, size)
        return cls._made(os.memfd_create("lightning-tspipe-cache", os.MFD_CLOEXEC), size)

    @classmethod
    def on_disk(cls, folder: str | os.PathLike[str] | None, size: int) -> Arena:
        """A file without a name.

        Args:
            folder: On the file system to use; it must exist. None: the system's temporary one.
            size: In bytes.

        Raises:
            ConfigurationError: The folder is missing, can't be written to, or has less space.
        """
        free = available_disk(folder)
        where = _where(folder)
        try:
            with tempfile.TemporaryFile(dir=where) as opened:
                file = os.dup(opened.fileno())
        except OSError as error:
            raise _unusable(where, error) from error
        if size > free:
            os.close(file)
            raise ConfigurationError(
                f"a disk budget of {megabytes(size)} for cached activations, but {str(where)!r} "
                f"has {megabytes(free)} left: lower it, or choose another folder"
            )
        return cls._made(file, size)

    @classmethod
    def _made(cls, file: int, size: int) -> Arena:
        os.ftruncate(file, size)
        return cls(file, size)

    @classmethod
    def attached(cls, handle: ArenaHandle) -> Arena:
        """The arena of another process.

        Raises:
            ConfigurationError: That process has ended, or is not one of this machine and user.
        """
        try:
            file = os.open(f"/proc/{handle.pid}/fd/{handle.file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(
                f"the cache of process {handle.pid} can't be shared ({error.strerror}): it is "
                "shared by processes of one user on one Linux machine, while the first one runs"
            ) from error
        return cls(file, handle.size)

    @property
    def handle(self) -> ArenaHandle:
        """For :meth:`attached`, as long as this process lives."""
        return ArenaHandle(os.getpid(), self._file, self.size)

    def claim(self, end: int) -> bool:
        """Make sure that the bytes before ``end`` exist.

        Returns:
            False if there is no space for them; what was claimed before is as it was.
        """
        if end > self.size:
            return False
        if end <= self._claimed:
            return True
        for upto in (min(self.size, end + _STEP), end):
            with suppress(OSError):
                _fallocate(self._file, self._claimed, upto - self._claimed)
                self._claimed = upto
                return True
        return False

    def expect(self, places: Sequence[int], size: int) -> None:
        """Let the system fetch entries into memory already; it does so beside other work."""
        page = mmap.PAGESIZE
        for place in places:
            first = place // page * page
            self._map.madvise(mmap.MADV_WILLNEED, first, min(place + size, self.size) - first)

    def forget(self) -> None:
        """Let the system drop its copy in memory of what lies on disk: for measurements."""
        self._map.flush()
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it; twice is fine. Tensors that view it keep it mapped."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.memory = torch.empty(0, dtype=torch.uint8)
        with suppress(BufferError):  # someone still looks at it
            self._map.close()


def _fallocate(file: int, start: int, size: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, start, size)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:  # a file system without it
            raise


def available_memory() -> int | None:
    """Bytes that the machine can still give; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line), None)


def available_disk(folder: str | os.PathLike[str] | None) -> int:
    """Bytes that the file system of a folder can still give.

    Raises:
        ConfigurationError: There is no such folder.
    """
    where = _where(folder)
    try:
        status = os.statvfs(where)
    except OSError as error:
        raise _unusable(where, error) from error
    return status.f_bavail * status.f_frsize


def _where(folder: str | os.PathLike[str] | None) -> Path:
    return Path(folder) if folder is not None else Path(tempfile.gettempdir())


def _unusable(where: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"no cache of activations in {str(where)!r}: {error.strerror}. Give a folder that exists "
        "and can be written to"
    )


def megabytes(size: float) -> str:
    """Bytes for a message.

    >>> megabytes(3_000_000)
    '3.0 MB'
    """
    return f"{size / 1e6:,.1f} MB"
