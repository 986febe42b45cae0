"""Processes of this machine: whether they live, how they have ended, and whose parent is gone.

The system is asked, not the process: one that is stopped or killed can't answer, and says nothing
on its connections either until somebody waits there.

Processes end when the one that started them is gone, from their first moment on::

    a child of this package's  ──► the system ends it (SIGKILL, on Linux) ──► it has met the others:
    of torchrun's, of SLURM's  ──► a thread does, from the Trainer on     ──► its watch does, which
    of a fork server's         ──► a thread does, from its first call on      can tidy up
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import select
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

PARENT = "LIGHTNING_TSPIPE_PARENT"
"""Environment variable: the process that started this one, and has to live as long."""
_FLAGS, _STARTED, _EXIT_CODE = 6, 19, 49
"""Places in ``/proc/<pid>/stat``, counted from behind the name; the state is the first."""
_PF_EXITING = 4
_PIDFD_GET_INFO = 0xC040FF0B
_INFO = struct.Struct("<QQ11Ii")
_INFO_EXIT = 1 << 3
_PR_SET_PDEATHSIG = 1
_PRCTL: Any = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_AT_IMPORT = os.getpid(), os.getppid()
_PERIOD = 0.5
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")
_HAVE_MET = threading.Event()
_WATCH = "lightning-tspipe-launcher"


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


_Found = TypeVar("_Found")


def until(look: Callable[[], _Found], seconds: float, pause: float = 0.02) -> _Found:
    """Look again and again for so many seconds, until there is something; what was seen last."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(pause)
    return found


class Neighbour:
    """Another process of this machine, told apart from a later one with the same number.

    Args:
        pid: Its number.
        started: When it started (:func:`start_of`); None: not known.
    """

    def __init__(self, pid: int, started: int | None = None) -> None:
        self.pid = pid
        self._started = started
        self._has_ended = False
        self._file: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # gone, not permitted here, or too old a system
                self._file = os.pidfd_open(pid)
                weakref.finalize(self, os.close, self._file).atexit = False
        # From here on the number can't be given to another process unnoticed.
        self._has_ended = self._is_another_one() or (self._file is None and self.has_ended)

    def _is_another_one(self) -> bool:
        return self._started is not None and start_of(self.pid) not in {None, self._started}

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, even if its parent has not asked for its exit code yet."""
        self._has_ended = self._has_ended or self._ended_now()
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
        return self._state == "Z" or self._is_another_one()

    @property
    def _state(self) -> str:
        return next(iter(_stat(self.pid)), "")

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
        return self._state == "T" and not self.has_ended

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
        if fields and fields[0] == "Z" and not self._is_another_one():
            return int(fields[_EXIT_CODE]) or None  # 0 too if it is not to be known
        return None


def signed_by_this_process() -> str:
    """What to tell a process about its parent, which is this one."""
    return f"{os.getpid()} {start_of(os.getpid()) or 0}"


def parent_of(text: str) -> Neighbour:
    """The process that signed so."""
    pid, started = map(int, text.split())
    return Neighbour(pid, started or None)


def end_with_parent(parent: str) -> None:
    """In a process that was just started: it ends with its parent, and at once if that is gone.

    Args:
        parent: What the parent signed.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Before that call nothing would have told of it.
    if parent_of(parent).has_ended:
        os._exit(1)


def before_exec() -> Callable[[], None] | None:
    """For ``subprocess.Popen(preexec_fn=...)``: the child ends with this process.

    None where the system can't, or would do so too early: it means the *thread* that starts a
    process, and only the main one is sure to live as long as this process.
    """
    if _PRCTL is None or threading.current_thread() is not threading.main_thread():
        return None
    return partial(_end_with, os.getpid(), _PRCTL)


def _end_with(parent: int, prctl: Callable[..., Any]) -> None:
    # Between fork and exec: nothing is imported here, and nothing is printed.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def watch_launcher() -> None:
    """Before the ranks have met: end this process if what launched it is gone.

    The system ends a child of this package's, as a rule; that of a fork server's is another one's.
    """
    parent = Parent()
    if parent.pid and all(thread.name != _WATCH for thread in threading.enumerate()):
        threading.Thread(target=_look_after, args=(parent,), name=_WATCH, daemon=True).start()


def _look_after(parent: Parent) -> None:
    while not _HAVE_MET.wait(_PERIOD):
        if parent.has_ended:
            sys.stderr.write(f"process {parent.pid}, which had started this rank, has ended\n")
            os._exit(1)


def watch_instead() -> None:
    """From now on the ranks' own watch looks whether what started them lives."""
    _HAVE_MET.set()
    if _PRCTL is not None and PARENT in os.environ:
        _PRCTL(_PR_SET_PDEATHSIG, 0)


class Parent:
    """The process that has started this one, if it has to live as long.

    A shell may be left by what it started; a launcher may not.
    """

    def __init__(self) -> None:
        self._neighbour: Neighbour | None = None
        self._adopted_from = 0
        if PARENT in os.environ:
            self._neighbour = parent_of(os.environ[PARENT])
        elif any(name in os.environ for name in _LAUNCHERS):
            imported_by, parent = _AT_IMPORT
            self._adopted_from = parent if imported_by == os.getpid() else os.getppid()
            if self._adopted_from > 1:  # otherwise it is out of sight, or this container's first
                self._neighbour = Neighbour(self._adopted_from)

    @property
    def pid(self) -> int:
        """Its number; 0 if there is none that has to live."""
        return self._neighbour.pid if self._neighbour is not None else 0

    @property
    def has_ended(self) -> bool:
        """Whether there is one, and it runs no more."""
        if self._neighbour is None:
            return False
        adopted = self._adopted_from > 1 and os.getppid() != self._adopted_from
        return adopted or self._neighbour.has_ended
