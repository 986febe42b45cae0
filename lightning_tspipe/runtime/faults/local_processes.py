"""Other processes of this machine: whether they live, are stopped, or how they have ended.

The system is asked, not the process: one that is stopped or killed can't answer, and says nothing
on its connections either until somebody waits there.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
from contextlib import suppress
from pathlib import Path

_STATE, _FLAGS, _STARTED, _EXIT_CODE = 0, 6, 19, 49
"""Places in ``/proc/<pid>/stat``, counted from behind the name."""
_PF_EXITING = 4
_PIDFD_GET_INFO = 0xC040FF0B
_INFO = struct.Struct("<QQ11Ii")
_INFO_EXIT = 1 << 3


def this_machine() -> str:
    """A text that is the same for processes which can see each other by their numbers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return os.uname().nodename


def start_of(pid: int) -> int | None:
    """When a process started, in ticks of the system; None if it is gone, or there is no way."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields else None


def _stat(pid: int) -> list[str]:
    try:
        # The name may hold anything, brackets too.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Neighbour:
    """Another process of this machine, told apart from a later one with the same number.

    Args:
        pid: Its number.
        started: When it started (:func:`start_of`); None: not known.
    """

    _file: int | None = None

    def __init__(self, pid: int, started: int | None = None) -> None:
        self.pid = pid
        self._started = started
        self._has_ended = False
        self._file = None
        if hasattr(os, "pidfd_open"):
            try:
                self._file = os.pidfd_open(pid)
            except ProcessLookupError:
                self._has_ended = True
            except OSError:  # not permitted here, or too old a system
                self._file = None
        # From here on the number can't be given to another process unnoticed.
        self._has_ended = self._has_ended or self._is_another_one()

    def _is_another_one(self) -> bool:
        return self._started is not None and start_of(self.pid) not in {None, self._started}

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, even if its parent has not asked for its exit code yet."""
        if not self._has_ended:
            self._has_ended = self._ended_now()
        return self._has_ended

    def _ended_now(self) -> bool:
        if self._file is not None:
            poll = select.poll()
            poll.register(self._file, select.POLLIN)
            return bool(poll.poll(0))
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        fields = _stat(self.pid)
        return bool(fields and fields[_STATE] == "Z") or self._is_another_one()

    @property
    def is_ending(self) -> bool:
        """Whether it has ended, or has been killed and is about to."""
        if self.has_ended:
            return True
        fields = _stat(self.pid)
        if fields and int(fields[_FLAGS]) & _PF_EXITING:
            return True
        with suppress(OSError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            pending = re.search(r"^ShdPnd:\s*(\w+)", status, re.MULTILINE)
            return pending is not None and bool(int(pending[1], 16) >> (signal.SIGKILL - 1) & 1)
        return False

    @property
    def is_stopped(self) -> bool:
        """Whether it is halted, by SIGSTOP for example, and would go on after SIGCONT."""
        fields = _stat(self.pid)
        return bool(fields) and fields[_STATE] == "T" and not self.has_ended

    def kill(self) -> None:
        """End it at once, whatever it does."""
        with suppress(OSError):
            if self._file is not None:
                signal.pidfd_send_signal(self._file, signal.SIGKILL)
            elif not self.has_ended:
                os.kill(self.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        """``was killed by SIGKILL``, for example; ``ended`` if the system doesn't tell how."""
        status = self._status()
        if status is None:
            return "ended"
        if status & 0x7F:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(status & 0x7F).name}"
            return f"was killed by signal {status & 0x7F}"
        return f"ended with exit code {status >> 8}"

    def _status(self) -> int | None:
        if self._file is not None:
            with suppress(OSError):  # Linux from 6.15 on remembers it, for those who watched
                asked = bytearray(_INFO.pack(_INFO_EXIT, *([0] * 13)))
                fcntl.ioctl(self._file, _PIDFD_GET_INFO, asked)
                mask, *_, status = _INFO.unpack(asked)
                if mask & _INFO_EXIT:
                    return int(status)
        fields = _stat(self.pid)  # until the parent has asked, it is there
        if fields and fields[_STATE] == "Z" and not self._is_another_one():
            return int(fields[_EXIT_CODE]) or None  # 0 too if it is not to be known
        return None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Watch it no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
