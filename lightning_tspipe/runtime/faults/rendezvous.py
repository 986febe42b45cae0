"""How the processes of a job find each other, and what connects them besides their messages.

On one machine that is a folder which only this user can open: the store that ``torch.distributed``
needs is a file in it, and so are the notes. No process serves it, so one that is stopped or killed,
rank 0 too, keeps no other one waiting there. Over several machines rank 0, or the launcher, serves
a store.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import active_children, current_process, util
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined] # they are
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults.loader_workers import let_children_end
from lightning_tspipe.runtime.faults.local_processes import Neighbour
from lightning_tspipe.runtime.faults.members import Members
from lightning_tspipe.runtime.faults.notes import FolderNotes, Notes, StoreNotes
from lightning_tspipe.runtime.faults.parents import parent_of
from lightning_tspipe.runtime.faults.phases import HERE, phase_of
from lightning_tspipe.runtime.faults.private_folder import (
    entry_name,
    find_job_folder,
    keep_job_folder,
    make_job_folder,
    private_folder,
    remove_job_folder,
    remove_too,
)

JOB_TOKEN = "LIGHTNING_TSPIPE_JOB"  # noqa: S105 - the name of an environment variable
"""What the processes that one launcher has started have in common."""
HEIR = "LIGHTNING_TSPIPE_HEIR"
"""Who has launched them, and looks for what they have left when all have ended."""
_LAUNCHERS = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip
_STORE = "store"
_CONNECTIONS = itertools.count()
_PAUSE = 0.02
_CHILD_SECONDS = 2.0
_ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class Job:
    """The processes of a job, and what connects them besides their messages.

    Attributes:
        members: Who is where.
        notes: What they tell each other.
        folder: Where they meet; None: they are on several machines.
        store: What ``torch.distributed`` connects them by.
    """

    members: Members
    notes: Notes
    folder: Path | None
    store: Store

    def new_store(self) -> Store:
        """Where the n-th call, on all ranks, finds nothing of the calls before."""
        return PrefixStore(f"connection-{next(_CONNECTIONS)}", self.store)

    def phase_of(self, rank: int) -> str:
        """What a rank is doing, or did before it ended; "" if unknown."""
        return phase_of(self.folder, rank) if self.folder is not None else ""

    def keep(self) -> None:
        """Once in a while: the job is not over yet."""
        if self.folder is not None:
            keep_job_folder(self.folder)

    def leave(self) -> None:
        """This process ends; the last one removes what they had in common."""
        if self.folder is not None and not self.folder.exists():
            return
        self.notes.leave(f"left/{self.members.rank}")
        if self.folder is None or self.has_heir:
            return
        if all(map(self._has_left, range(self.members.num_ranks))):
            remove_job_folder(self.folder)
            inherited = current_process()._config.get("tempdir")  # type: ignore[attr-defined] # noqa: SLF001
            if inherited and HEIR in os.environ:  # a fork server's, whose process was killed
                shutil.rmtree(inherited, ignore_errors=True)

    @property
    def has_heir(self) -> bool:
        """Whether the process that has launched the ranks will look for what they have left."""
        return HEIR in os.environ and not parent_of(os.environ[HEIR]).is_ending

    @property
    def launcher_knows_more(self) -> bool:
        """Whether it is for whoever launched the ranks to tell of one that a signal has ended.

        It ends the others so when one has failed, and knows that one, even if these don't.
        """
        return self.has_heir or bool(self.members.missing())

    def _has_left(self, rank: int) -> bool:
        member = self.members.find(rank)
        if member is None or self.notes.read(f"left/{rank}") is not None:
            return True
        near = member.machine == self.members.this.machine
        return near and Neighbour(member.pid, member.started).is_ending


class Launched:
    """A job, seen by a process that launches its ranks and is none of them.

    Args:
        token: What the ranks have in common.
        port: Theirs, too.
    """

    def __init__(self, token: str, port: int) -> None:
        self._entry = private_folder() / _name(port, token)

    @property
    def _folder(self) -> Path | None:
        try:
            return self._entry.parent / self._entry.read_text().strip()
        except FileNotFoundError:
            return None

    def told_causes(self) -> Iterator[int | None]:
        """The ranks that ended the job, as ranks have told; None for one of unknown number."""
        if self._folder is not None:
            for path in self._folder.glob("run-*-cause"):
                first = path.read_text().partition(" ")[0]
                yield int(first) if first.isdigit() else None

    def phase_of(self, rank: int) -> str:
        """What a rank did before it ended."""
        found = phase_of(self._folder, rank) if self._folder is not None else ""
        return found or "the start-up"

    def remove(self) -> None:
        """Remove what ranks have left, all of which have ended."""
        if self._folder is not None:
            remove_job_folder(self._folder)


class _Current:
    """The job of this process; as the default process group, there is one."""

    job: Job | None = None
    tell: Callable[[int], None] | None = None


def current_job() -> Job | None:
    """The job that this process belongs to; None before it has met the others."""
    return _Current.job


def stay_on_this_machine() -> None:
    """Let process groups of this process listen on the loopback interface, unless told otherwise.

    Nothing outside of the machine needs to reach a job that runs on one.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def meet(port: int, rank: int, num_ranks: int, patience: timedelta, *, on_one_machine: bool) -> Job:
    """Find the other processes of this job, once per process; later calls return the same.

    Args:
        port: A number that the ranks of one job agree on, and those of another one do not.
        rank: This rank.
        num_ranks: Ranks of the job.
        patience: How long to wait for rank 0.
        on_one_machine: Whether all ranks are on this machine.

    Raises:
        TransportError: Rank 0 did not come.
        ConfigurationError: Another job is in the way.
    """
    if _Current.job is None:
        if on_one_machine:
            _expect_launcher(port)
            job = _meet_here(port, rank, num_ranks, patience)
        else:
            job = _meet_across(rank, num_ranks, patience)
        job.members.publish()
        if job.folder is not None:
            HERE.share(job.folder, rank)
            if "tempdir" not in current_process()._config:  # type: ignore[attr-defined] # noqa: SLF001
                # Made now, it is also that of loaders' workers, who leave their sockets there.
                remove_too(job.folder, rank, util.get_temp_dir())
        # Not atexit, which processes that multiprocessing has started don't ask; and after this
        # process has removed its own temporary files (-100).
        util.Finalize(None, job.leave, exitpriority=-101)
        _Current.job = job
        _leave_before_sigterm()
    return _Current.job


def end_by(signum: int) -> None:
    """End this process by a signal, and tidy up before: leave the job, remove temporary files."""
    if _Current.job is not None and _Current.job.members.this.pid == os.getpid():
        if _Current.tell is not None:
            _Current.tell(signum)
        _end_as_usual()
        _Current.job.leave()  # again: the signal may have come while this process was leaving
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _end_as_usual() -> None:
    """What multiprocessing does at any other end; a child that does not end isn't waited for."""
    run: Callable[..., None] = util._run_finalizers  # type: ignore[attr-defined] # noqa: SLF001
    run(0)
    let_children_end()
    # Before the folder goes in which loaders' workers have sockets.
    for child in (each for each in active_children() if each.daemon):
        child.terminate()
        child.join(_CHILD_SECONDS)
    run()


def tell_before_the_end(tell: Callable[[int], None]) -> None:
    """What is to be called before this process is ended by a signal, with its number."""
    _Current.tell = tell


def _leave_before_sigterm() -> None:
    """A launcher ends what is left of a job that fails by this signal, at any moment."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(signum: int, _frame: Any) -> None:
        # Otherwise it is called by another handler, which decides.
        if signal.getsignal(signum) is end:
            end_by(signum)

    signal.signal(signal.SIGTERM, end)


def _expect_launcher(port: int) -> None:
    """Ranks without their launcher are not to begin.

    Raises:
        TransportError: torchrun has ended: its store, which the ranks don't need, is gone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        socket.create_connection((address, port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise TransportError(
            f"torchrun, which had started this rank, has ended: nobody answers at {address}:{port} "
            f"({error})"
        ) from error


def _meet_here(port: int, rank: int, num_ranks: int, patience: timedelta) -> Job:
    if dist.is_initialized():  # by somebody else
        box = [str(make_job_folder(_name(port))) if rank == 0 else ""]
        dist.broadcast_object_list(box, 0)
        folder = Path(box[0])
    else:
        folder = make_job_folder(_name(port)) if rank == 0 else _wait_for_rank_0(port, patience)
    # No number of processes: the file goes with its folder, and not with the last of them.
    store = FileStore(str(folder / _STORE))
    store.set_timeout(patience)
    # Its destructor would count in a file that the last process has removed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    notes = FolderNotes(folder)
    return Job(Members(rank, num_ranks, notes), notes, folder, store)


def _name(port: int, token: str = "") -> str:
    origin = [os.environ.get(name, "") for name in _LAUNCHERS]
    return entry_name(
        os.uname().nodename, str(port), token or os.environ.get(JOB_TOKEN, ""), *origin
    )


def _wait_for_rank_0(port: int, patience: timedelta) -> Path:
    name = _name(port)
    deadline = time.monotonic() + patience.total_seconds()
    while (folder := find_job_folder(name)) is None:
        if time.monotonic() > deadline:
            raise TransportError(
                f"rank 0 did not come within {patience.total_seconds():.0f} s. The ranks of one "
                f"machine meet in {private_folder() / name}: all of them need the same MASTER_PORT "
                "and TMPDIR. If rank 0 has failed, its output says why"
            )
        time.sleep(_PAUSE)
    return folder


def _meet_across(rank: int, num_ranks: int, patience: timedelta) -> Job:
    store: Any
    if dist.is_initialized():
        store = _get_default_store()
    else:
        store, _, _ = next(rendezvous("env://", rank, num_ranks, timeout=patience))
    # A connection of its own: calls on one wait for each other.
    own = PrefixStore("lightning_tspipe", store.clone())
    notes = StoreNotes(own, min(_ANSWER_SECONDS, patience.total_seconds()))
    return Job(Members(rank, num_ranks, notes), notes, None, store)
