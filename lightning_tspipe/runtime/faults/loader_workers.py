"""Workers of loaders: when the end of one is a failure, and when it isn't."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import DataLoader

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.faults.local_processes import until
from lightning_tspipe.runtime.faults.private_folder import shared_temporary_folder

_SECONDS = 1.0
"""For a process that has died to be known as dead."""
_LONGEST_ADDRESS = 107 if sys.platform == "linux" else 103
"""Of a socket with a name, in bytes."""
_CAN_WAIT = hasattr(signal, "sigwaitinfo")  # not on macOS
GRACE = 30.0
"""Seconds that a worker outlives a SIGTERM; torchrun gives a rank as many to end."""


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a loader whose workers outlive a SIGTERM to all processes of their rank.

    torchrun, and others that end a job, send one to a rank and to its loaders' workers. The rank
    stops at the end of a batch, with those of the other ranks, and may have to read until then.
    Workers of a fork server, which other processes have in common, end as they did.

    Raises:
        ConfigurationError: The temporary folder's path is too long for the workers' sockets. torch
            would lose their batches without a word, and the rank would wait for ever.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return iter(loader)
    # The folder is made now, and also that of workers, who leave their sockets there if ended.
    address = f"{shared_temporary_folder()}/listener-12345678"  # such as multiprocessing makes up
    if get_sharing_strategy() == "file_descriptor" and len(os.fsencode(address)) > _LONGEST_ADDRESS:
        raise ConfigurationError(
            f"the loader's workers can't send a batch: their sockets would have paths such as "
            f"{address}, but the limit is {_LONGEST_ADDRESS} characters. Set "
            "TMPDIR to a shorter path, or num_workers=0"
        )
    context = loader.multiprocessing_context or multiprocessing
    if not _CAN_WAIT or context.get_start_method() == "forkserver":
        return iter(loader)
    if context.get_start_method() == "spawn":
        resource_tracker.ensure_running()  # its start lets the signal through
    users = loader.worker_init_fn
    loader.worker_init_fn = partial(_begin, users, os.getpid())
    # Inherited by all threads of the workers, those of libraries too.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = users


def _begin(users: Callable[[int], None] | None, rank: int, worker: int) -> None:
    """Begin a worker of a loader for a rank's process, and as the loader's user has it begin."""
    threading.Thread(target=_end_on_request, args=(rank,), daemon=True).start()
    sys.excepthook = partial(_tell, sys.excepthook, rank)
    if users is not None:
        users(worker)


def _tell(usual: Callable[..., None], rank: int, kind: Any, error: Any, trace: Any) -> None:
    """Tell of an error in a thread of a worker, unless its rank was killed while it took a batch.

    Its end of the connection is closed a moment before it is known as dead.
    """
    is_connection = isinstance(error, ConnectionError | EOFError)
    if not (is_connection and until(lambda: os.getppid() != rank, _SECONDS)):
        usual(kind, error, trace)


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
