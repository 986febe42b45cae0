"""How the processes of a job find each other, and what connects them besides their messages.

On one machine that is a folder which only this user can open: the store that ``torch.distributed``
needs is a file in it, and so are the notes. No process serves it, so one that is stopped or killed,
rank 0 too, keeps no other one waiting there. Over several machines rank 0, or the launcher, serves
a store.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing import active_children, current_process, util
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined] # they are
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from lightning_tspipe.errors import ConfigurationError, TransportError
from lightning_tspipe.runtime.faults import local_processes
from lightning_tspipe.runtime.faults import private_folder as folders
from lightning_tspipe.runtime.faults.loader_workers import let_children_end
from lightning_tspipe.runtime.faults.local_processes import Neighbour
from lightning_tspipe.runtime.faults.notes import FolderNotes, Notes, StoreNotes
from lightning_tspipe.runtime.faults.phases import HERE, phase_of
from lightning_tspipe.runtime.faults.starts import store_of_start

JOB_TOKEN = "LIGHTNING_TSPIPE_JOB"  # noqa: S105 - the name of an environment variable
"""What the processes that one launcher has started have in common."""
HEIR = "LIGHTNING_TSPIPE_HEIR"
"""Who has launched them, and looks for what they have left when all have ended."""
_LAUNCHERS = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip
_CONNECTIONS = itertools.count()
_CHILD_SECONDS = 2.0
_ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class Member:
    """One process of a job.

    Attributes:
        rank: Its rank.
        host: Name of its machine.
        machine: The same for processes that can see each other by their numbers.
        pid: Its number.
        started: When it started, in ticks; None: not known.
    """

    rank: int
    host: str
    machine: str
    pid: int
    started: int | None

    def __str__(self) -> str:
        return process_name(self.rank, self.pid, self.host)


def process_name(rank: int, pid: int, host: str = "") -> str:
    """A rank and its process, on this machine unless another one is named."""
    return f"rank {rank} (pid {pid} on {host or os.uname().nodename})"


@dataclass(eq=False)
class Job:
    """The processes of a job, and what connects them besides their messages.

    Attributes:
        rank: This rank.
        num_ranks: How many there are to be; 0: it has met no other one.
        notes: What they tell each other.
        folder: Where they meet; None: they are on several machines.
        store: What ``torch.distributed`` connects them by.
        num_begun: Runs that all ranks have begun together, and changes of the mesh.
        children: The processes that this one has started for other ranks.
        tell: Called with a signal's number before that ends this process.
        this: This process.
    """

    rank: int
    num_ranks: int = 0
    notes: Notes = field(default_factory=Notes)
    folder: Path | None = None
    store: Any = None
    num_begun: int = 0
    children: dict[int, Neighbour] = field(default_factory=dict)
    tell: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        pid = os.getpid()
        self.this = Member(
            self.rank,
            os.uname().nodename,
            local_processes.this_machine(),
            pid,
            local_processes.start_of(pid),
        )
        self._known = {self.rank: self.this}
        self._neighbours: dict[int, Neighbour] = {}

    # Who is where

    def publish(self) -> None:
        """Say who this rank is.

        Raises:
            ConfigurationError: Another process is this rank.
        """
        if HEIR in os.environ:  # who reads what the ranks have told when all of them have ended
            pid, started = map(int, os.environ[HEIR].split())
            self.notes.leave("member/heir", json.dumps({"pid": pid, "started": started or None}))
        if not self.notes.claim(f"member/{self.rank}", json.dumps(asdict(self.this))):
            other = self._read(self.rank)
            raise ConfigurationError(
                f"{self.this}: another process, {other or 'which has ended'}, already has this "
                "rank in the job. Two jobs must not have the same MASTER_ADDR and MASTER_PORT"
            )

    def find(self, rank: int) -> Member | None:
        """A rank's process; None if it has not come yet."""
        if rank not in self._known and (found := self._read(rank)) is not None:
            self._known[rank] = found
        return self._known.get(rank)

    def _read(self, rank: int) -> Member | None:
        text = self.notes.read(f"member/{rank}")
        return Member(**json.loads(text)) if text else None

    def name(self, rank: int) -> str:
        """A rank with its process, if that is known."""
        return str(self._known.get(rank, f"rank {rank}"))

    def is_near(self, member: Member) -> bool:
        """Whether a process is on this machine."""
        return member.machine == self.this.machine

    def neighbour(self, rank: int) -> Neighbour | None:
        """The process of a rank that is on this machine; None: it is not, or has not come yet."""
        if rank not in self._neighbours:
            member = self.find(rank)
            if member is None:
                return self.children.get(rank)
            if not self.is_near(member):
                return None
            self._neighbours[rank] = Neighbour(member.pid, member.started)
        return self._neighbours[rank]

    def neighbours(self) -> dict[int, Neighbour]:
        """The processes of the other ranks on this machine, as far as they have come."""
        others = (rank for rank in range(self.num_ranks) if rank != self.rank)
        found = ((rank, self.neighbour(rank)) for rank in others)
        return {rank: neighbour for rank, neighbour in found if neighbour is not None}

    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self.num_ranks) if self.find(rank) is None]

    def wait_for_all(self, seconds: float, has_failed: Callable[[], bool]) -> None:
        """Wait until all have come.

        Args:
            seconds: How long.
            has_failed: Whether nobody needs to come any more.

        Raises:
            TransportError: One has not, after so many seconds or since the job has failed.
        """
        in_time = local_processes.until(lambda: not self.missing() or has_failed(), seconds)
        if missing := ", ".join(map(str, self.missing())):
            if in_time:
                raise TransportError(f"rank {missing} has not joined")
            raise TransportError(
                f"rank {missing} did not join within {seconds:.0f} s of the start. If it has "
                "failed, its output says why"
            )

    # What they have in common

    def new_store(self) -> Store:
        """Where the n-th call, on all ranks, finds nothing of the calls before."""
        return PrefixStore(f"connection-{next(_CONNECTIONS)}", self.store)

    def phase_of(self, rank: int) -> str:
        """What a rank is doing, or did before it ended; "" if unknown."""
        return phase_of(self.folder, rank) if self.folder is not None else ""

    def leave(self) -> None:
        """This process ends; the last one removes what they had in common."""
        if self.folder is not None and not self.folder.exists():
            return
        self.notes.leave(f"left/{self.rank}")
        if self.folder is None or self.has_heir:
            return
        if all(map(self._has_left, range(self.num_ranks))):
            folders.remove_job_folder(self.folder)
            inherited = current_process()._config.get("tempdir")  # type: ignore[attr-defined] # noqa: SLF001
            if inherited and HEIR in os.environ:  # a fork server's, whose process was killed
                shutil.rmtree(inherited, ignore_errors=True)

    def _has_left(self, rank: int) -> bool:
        if self.find(rank) is None or self.notes.read(f"left/{rank}") is not None:
            return True
        neighbour = self.neighbour(rank)
        return neighbour is not None and neighbour.is_ending

    @property
    def has_heir(self) -> bool:
        """Whether the process that has launched the ranks will look for what they have left."""
        return HEIR in os.environ and not local_processes.parent_of(os.environ[HEIR]).is_ending

    @property
    def launcher_knows_more(self) -> bool:
        """Whether it is for whoever launched the ranks to tell of one that a signal has ended.

        It ends the others so when one has failed, and knows that one, even if these don't.
        """
        return self.has_heir or bool(self.missing())


class Launched:
    """A job, seen by a process that launches its ranks and is none of them.

    Args:
        token: What the ranks have in common.
        port: Theirs, too.

    Attributes:
        temporary: A folder for temporary files of the process that launches.
    """

    def __init__(self, token: str, port: int) -> None:
        # Now: while the ranks run, temporary files of this process lie in a folder of its own.
        self._entry = folders.private_folder() / _name(port, token)
        self.temporary = folders.make_job_folder(folders.entry_name("launch", token))

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
        """Remove what ranks have left, all of which have ended, and the temporary files."""
        if self._folder is not None:
            folders.remove_job_folder(self._folder)
        folders.remove_job_folder(self.temporary)


_JOB: list[Job] = []
"""Of this process; as the default process group, there is one at most."""


def current_job() -> Job | None:
    """The job that this process belongs to; None before it has met the others."""
    return _JOB[0] if _JOB else None


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
    if not _JOB:
        if on_one_machine:
            # Nothing outside of the machine needs to reach the job: its process groups listen on
            # the loopback interface, unless told otherwise.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
            _expect_launcher(port)
            job = _meet_here(port, rank, num_ranks, patience)
        else:
            job = _meet_across(rank, num_ranks, patience)
        job.publish()
        if job.folder is not None:
            HERE.share(job.folder, rank)
            if not folders.has_shared_temporary_folder():
                # Made now, it is also that of loaders' workers, who leave their sockets there.
                folders.make_temporary_folder(job.folder, rank)
        # Not atexit, which processes that multiprocessing has started don't ask; and after this
        # process has removed its own temporary files (-100).
        util.Finalize(None, job.leave, exitpriority=-101)
        _JOB.append(job)
        tidy_before_sigterm()
    return _JOB[0]


def end_by(signum: int) -> None:
    """End this process by a signal, and tidy up before: leave the job, remove temporary files."""
    jobs = [job for job in _JOB if job.this.pid == os.getpid()]  # none of a rank that is alone
    for job in jobs:
        job.tell(signum)
    _end_as_usual()
    for job in jobs:
        job.leave()  # again: the signal may have come while this process was leaving
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _end_as_usual() -> None:
    """What multiprocessing does at any other end; a child that does not end isn't waited for."""
    run: Callable[..., None] = util._run_finalizers  # type: ignore[attr-defined] # noqa: SLF001
    run(0)
    let_children_end()
    # Before the folder goes in which loaders' workers have sockets.
    own: Any = (each for each in active_children() if each.daemon)
    # A process that was forked knows those of the one that it was forked from.
    for child in (each for each in own if each._parent_pid == os.getpid()):  # noqa: SLF001
        child.terminate()
        child.join(_CHILD_SECONDS)
    run()


def tidy_before_sigterm() -> None:
    """A launcher ends what is left of a job that fails by this signal, at any moment."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(signum: int, _frame: Any) -> None:
        # Otherwise it is called by another handler, which decides.
        if signal.getsignal(signum) is end:
            end_by(signum)

    signal.signal(signal.SIGTERM, end)


def _is_served_by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _expect_launcher(port: int) -> None:
    """Ranks without their launcher are not to begin.

    Raises:
        TransportError: torchrun has ended: its store, which the ranks don't need, is gone.
    """
    if not _is_served_by_torchrun():
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
    folder = folders.make_job_folder(_name(port)) if rank == 0 else Path()
    if dist.is_initialized():  # by somebody else
        box = [folder]
        dist.broadcast_object_list(box, 0)
        folder = box[0]
    elif rank > 0:
        folder = _wait_for_rank_0(port, patience)
    # No number of processes: the file goes with its folder, and not with the last of them.
    store = FileStore(str(folder / "store"))
    store.set_timeout(patience)
    # Its destructor would count in a file that the last process has removed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return Job(rank, num_ranks, FolderNotes(folder), folder, store)


def _name(port: int, token: str = "") -> str:
    origin = [os.environ.get(name, "") for name in _LAUNCHERS]
    return folders.entry_name(
        os.uname().nodename, str(port), token or os.environ.get(JOB_TOKEN, ""), *origin
    )


def _wait_for_rank_0(port: int, patience: timedelta) -> Path:
    name, seconds = _name(port), patience.total_seconds()
    found = local_processes.until(lambda: folders.find_job_folder(name), seconds)
    if found is None:
        raise TransportError(
            f"rank 0 did not join within {seconds:.0f} s. The ranks of one machine meet in "
            f"{folders.private_folder() / name}: all of them need the same MASTER_PORT and TMPDIR. "
            "If rank 0 has failed, its output says why"
        )
    return found


def _meet_across(rank: int, num_ranks: int, patience: timedelta) -> Job:
    store: Any
    if dist.is_initialized():
        store = _get_default_store()
    else:
        store, _, _ = next(rendezvous("env://", rank, num_ranks, timeout=patience))
        if _is_served_by_torchrun():
            store = store_of_start(store, rank, patience)
    # A connection of its own: calls on one wait for each other.
    own = PrefixStore("lightning_tspipe", store.clone())
    notes = StoreNotes(own, min(_ANSWER_SECONDS, patience.total_seconds()))
    return Job(rank, num_ranks, notes, None, store)
