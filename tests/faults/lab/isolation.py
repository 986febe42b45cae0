"""A network, a ``/dev/shm`` and a small disk of one's own, where the system allows it (root).

Then whatever a job leaves there is seen, and is nobody else's.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_NETWORK = 0x20000, 0x40000000
_PRIVATE, _RECURSIVE, _BIND = 1 << 18, 1 << 14, 1 << 12
_NAME_SERVERS = "/etc/resolv.conf"
_SUBREAPER = 36
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_LISTENING = "0A"
_CLOSING = 2.0
"""Seconds in which the system closes what ended processes had."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, or mounted over


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end."""
    _check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0))


def _check(code: int) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mount_memory(path: Path, size: str) -> None:
    options = f"size={size},mode=1777".encode()
    _check(_libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, options))


def _switch_loopback_on() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        _, flags, _ = struct.unpack("16sH14s", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14s", b"lo", flags | _UP, b""))


def _ask_no_server() -> None:
    """Have names looked up in vain at once: no server can be reached from here."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        file.flush()
        _check(_libc.mount(os.fsencode(file.name), os.fsencode(_NAME_SERVERS), None, _BIND, None))


@dataclass(frozen=True)
class Place:
    """Where jobs of this process run.

    Attributes:
        is_own: Whether network and shared memory are its own.
        files_before: What was in the shared memory.
    """

    is_own: bool
    files_before: frozenset[str]

    def shared_files(self) -> list[str]:
        """What jobs left in the shared memory."""
        return sorted(_names(SHARED_MEMORY) - self.files_before)

    def listeners(self) -> list[str]:
        """The ports on which somebody listens; none are known where others have the same."""
        deadline = time.monotonic() + _CLOSING
        while (found := self._listeners()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _listeners(self) -> list[str]:
        if not self.is_own:
            return []
        found = []
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
                fields = [line.split() for line in lines]
                found += [f[1].rpartition(":")[2] for f in fields if f[3] == _LISTENING]
        return [str(int(port, 16)) for port in found]

    def give_disk(self, path: Path, size: str) -> bool:
        """Make a folder a disk of its own; whether that is possible."""
        path.mkdir(exist_ok=True)
        if self.is_own:
            _mount_memory(path, size)
        return self.is_own


def _names(path: Path) -> frozenset[str]:
    return frozenset(os.listdir(path)) if path.exists() else frozenset()  # noqa: PTH208 - names


def isolate() -> Place:
    """Have this process and its descendants in a place of their own, if that is possible."""
    try:
        _check(_libc.unshare(_NEW_MOUNTS | _NEW_NETWORK))
        _check(_libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None))
        _mount_memory(SHARED_MEMORY, "1g")
        _switch_loopback_on()
        _ask_no_server()
    except OSError:
        return Place(is_own=False, files_before=_names(SHARED_MEMORY))
    return Place(is_own=True, files_before=frozenset())
