"""Anonymous shared space, in memory or on disk, for the processes of one machine.

The files have no names: the system frees them when the last process that has them open ends,
however it ends. So there is nothing to clean up, and nothing that the next run could find.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_tspipe.errors import ConfigurationError

Folder = str | os.PathLike[str] | None
"""An existing folder on a file system to use; None: the temporary folder."""

_STEP = 64 * 2**20
"""Bytes that are allocated at a time."""


class ArenaHandle(NamedTuple):
    """Address of an arena for other processes of the same machine and user."""

    pid: int
    file: int
    size: int


class Arena:
    """A range of bytes that several processes have mapped.

    Space is allocated when it is needed and not before; a full disk is reported, rather than ending
    the process by a signal.

    Attributes:
        memory: All its bytes, shape (size,).
        size: Number of bytes.
    """

    def __init__(self, file: int, size: int) -> None:
        self._file = file
        self.size = size
        os.ftruncate(file, size)
        self._map = mmap.mmap(file, size)
        self.memory: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._claimed = 0

    @classmethod
    def in_memory(cls, size: int) -> Arena:
        """Make an arena in anonymous memory.

        Raises:
            ConfigurationError: The machine has less free memory.
        """
        available = available_memory()
        if available is not None:
            _check_budget(size, available, "the machine")
        if not hasattr(os, "memfd_create"):  # not Linux
            return cls.on_disk(None, size)
        return cls(os.memfd_create("lightning-tspipe-cache", os.MFD_CLOEXEC), size)

    @classmethod
    def on_disk(cls, folder: Folder, size: int) -> Arena:
        """Make an arena in a file without a name.

        Args:
            folder: Where the file is.
            size: Number of bytes.

        Raises:
            ConfigurationError: The folder is missing, can't be written to, or has less space.
        """
        _check_budget(size, available_disk(folder), repr(os.fspath(folder or gettempdir())))
        try:
            with TemporaryFile(dir=folder) as opened:
                return cls(os.dup(opened.fileno()), size)
        except OSError as error:
            raise _unusable(folder, error) from error

    @classmethod
    def attached(cls, handle: ArenaHandle) -> Arena:
        """Attach to the arena of another process.

        Raises:
            ConfigurationError: It has ended, or belongs to another machine or user.
        """
        try:
            file = os.open(f"/proc/{handle.pid}/fd/{handle.file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(
                f"the cache of process {handle.pid} can't be shared ({error.strerror}): only "
                "processes of one user on one Linux machine share it, while the first one runs"
            ) from error
        return cls(file, handle.size)

    @property
    def handle(self) -> ArenaHandle:
        """Argument of :meth:`attached`, valid while this process lives."""
        return ArenaHandle(os.getpid(), self._file, self.size)

    def claim(self, end: int) -> bool:
        """Allocate the bytes before ``end``.

        Returns:
            False if there is no space for them; what was allocated before does not change.
        """
        if end > self.size:
            return False
        for upto in (min(self.size, end + _STEP), end):
            if end > self._claimed:
                with suppress(OSError):
                    _fallocate(self._file, self._claimed, upto - self._claimed)
                    self._claimed = upto
        return end <= self._claimed

    def expect(self, place: int, size: int) -> None:
        """Have the system prefetch an entry into memory, in the background."""
        first = place // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, first, min(place + size, self.size) - first)

    def forget(self) -> None:
        """Drop the page cache of what is on disk, for measurements."""
        self._map.flush()
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the arena for one process at a time."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the arena; twice is fine. Tensors that view it keep it mapped."""
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
    """Free memory of the machine in bytes; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line), None)


def available_disk(folder: Folder) -> int:
    """Free bytes on the file system of a folder.

    Raises:
        ConfigurationError: There is no such folder.
    """
    try:
        return shutil.disk_usage(folder or gettempdir()).free
    except OSError as error:
        raise _unusable(folder, error) from error


def _check_budget(size: int, free: int, where: str) -> None:
    if size > free:
        raise ConfigurationError(
            f"a budget of {megabytes(size)} for cached activations, but {where} has "
            f"{megabytes(free)} left: lower it, or give another budget (memory, disk, folder)"
        )


def _unusable(folder: Folder, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"can't make an activation cache in {os.fspath(folder or gettempdir())!r}: "
        f"{error.strerror}. Give a folder that exists and is writable"
    )


def megabytes(size: float) -> str:
    """Format bytes for a message.

    >>> megabytes(3_000_000)
    '3.0 MB'
    """
    return f"{size / 1e6:,.1f} MB"
