"""Processes end when the one that started them is gone: from their first moment on.

::

    a child of this package's  ──► the system ends it (SIGKILL, on Linux) ──► it has met the others:
    of torchrun's, of SLURM's  ──► a thread does, from the Trainer on     ──► its patrol does, which
    of a fork server's         ──► a thread does, from its first call on      can tidy up
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_tspipe.runtime.faults.local_processes import Neighbour, start_of

PARENT = "LIGHTNING_TSPIPE_PARENT"
"""Environment variable: the process that started this one, and has to live as long."""
_PR_SET_PDEATHSIG = 1
_AT_IMPORT = os.getpid(), os.getppid()
_PERIOD = 0.5
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")


def _prctl() -> Callable[..., Any] | None:
    return ctypes.CDLL(None).prctl if sys.platform == "linux" else None


_PRCTL = _prctl()


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


class _Early:
    """The thread that looks after a launcher before the ranks have met."""

    thread: threading.Thread | None = None
    is_over = threading.Event()


def watch_launcher() -> None:
    """Before the ranks have met: end this process if what launched it is gone.

    The system ends a child of this package's, as a rule; that of a fork server's is another one's.
    """
    parent = Parent()
    if _Early.thread is None and parent.pid:
        _Early.thread = threading.Thread(
            target=_look_after, args=(parent,), name="lightning-tspipe-launcher", daemon=True
        )
        _Early.thread.start()


def _look_after(parent: Parent) -> None:
    while not _Early.is_over.wait(_PERIOD):
        if parent.has_ended:
            sys.stderr.write(f"process {parent.pid}, which had started this rank, has ended\n")
            os._exit(1)


def watch_instead() -> None:
    """From now on the ranks' own watch looks whether what started them lives."""
    _Early.is_over.set()
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
