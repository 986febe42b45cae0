"""Workers of loaders: when the end of one is a failure, and when it isn't."""

from __future__ import annotations

import signal
import threading
from typing import Any

_SECONDS = 1.0
"""For a process that has died to be known as dead."""


def refuse_killed_worker(iterator: Any, error: Exception) -> None:
    """Say so if a worker was killed in the middle of handing over a batch.

    torch tells of one that dies at any other time; here there is only a connection that has ended.

    Raises:
        RuntimeError: As torch's.
    """
    for worker in getattr(iterator, "_workers", ()):
        worker.join(_SECONDS)
        if worker.exitcode is not None and worker.exitcode < 0:
            raise RuntimeError(
                f"DataLoader worker (pid {worker.pid}) is killed by signal: "
                f"{signal.strsignal(-worker.exitcode)}"
            ) from error


class _Replaced:
    handler: Any = None


def let_children_end() -> None:
    """From here on, the end of a loader's worker is no failure: this process is ending too.

    torch raises when one was killed, in whatever the main thread does at that moment; and torchrun
    ends a rank together with its workers.
    """
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _Replaced.handler = before if before != signal.SIG_DFL else _Replaced.handler


def hear_of_children() -> None:
    """This process lives on after a failure, and begins anew: as it was before."""
    handler, _Replaced.handler = _Replaced.handler, None
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)
