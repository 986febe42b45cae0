"""Workers of loaders: when the end of one is a failure, and when it isn't."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader

_SECONDS = 1.0
"""For a process that has died to be known as dead."""
_CAN_WAIT = hasattr(signal, "sigwaitinfo")  # not on macOS
GRACE = 30.0
"""Seconds that a worker outlives a SIGTERM; torchrun gives a rank as many to end."""


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a loader whose workers outlive a SIGTERM to all processes of their rank.

    torchrun, and others that end a job, send one to a rank and to its loaders' workers. The rank
    stops at the end of a batch, with those of the other ranks, and may have to read until then.
    Workers of a fork server, which other processes have in common, end as they did.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers == 0 or not _CAN_WAIT:
        return iter(loader)
    context = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() == "forkserver":
        return iter(loader)
    if context.get_start_method() == "spawn":
        resource_tracker.ensure_running()  # its start lets the signal through
    users = loader.worker_init_fn
    loader.worker_init_fn = _Begin(users, os.getpid())
    # Inherited by all threads of the workers, those of libraries too.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = users


@dataclass(frozen=True)
class _Begin:
    """Begins a worker.

    Attributes:
        users: The ``worker_init_fn`` of the loader.
        rank: The process that reads the batches.
    """

    users: Callable[[int], None] | None
    rank: int

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_end_on_request, args=(self.rank,), daemon=True).start()
        if self.users is not None:
            self.users(worker)


def _end_on_request(rank: int) -> None:
    """End this worker at once if its rank wants that, and a while after anybody else did."""
    told = signal.sigwaitinfo({signal.SIGTERM})
    if told.si_pid != rank:
        told = signal.sigtimedwait({signal.SIGTERM}, GRACE) or told
    if told.si_pid == rank:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)


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
