"""A folder of this user, in which processes of one machine find each other.

It holds an *entry* for each job, which names the job's folder, and is locked by the job's rank 0 as
long as that lives: so nobody joins what a killed job has left behind. ::

    <temporary folder>/lightning-tspipe-1000/       only this user can open it
        job-node7-29500-3f1c        "work-x7k2", locked by rank 0
        work-x7k2/                  the store, notes, who is where
        job-launch-9ab2             "work-p3q8", locked by the process that starts the ranks
        work-p3q8/                  its temporary files
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.faults.local_processes import Neighbour

_ENTRY, _WORK, _WITH_IT = "job-", "work-", "also-"
_LOCK_SECONDS = 30.0
_PAUSE = 0.02
_WORKER_SECONDS = 6.0
"""A worker of torch's loaders asks every 5 s whether its rank is still there."""


@dataclass(frozen=True)
class _Held:
    """An entry that this process has locked.

    To close another opening of the same file would give up the lock: nothing asks the file.

    Attributes:
        pid: This process, and none that was forked from it.
        file: Open, since it holds the lock.
        folder: What the entry names.
    """

    pid: int
    file: int
    folder: str


_HELD: dict[str, _Held] = {}


def _held(entry: Path) -> _Held | None:
    held = _HELD.get(entry.name)
    return held if held is not None and held.pid == os.getpid() else None


def private_folder() -> Path:
    """The folder of this user, which exists then.

    Raises:
        ConfigurationError: Somebody else could write there, or read.
    """
    folder = Path(tempfile.gettempdir()) / f"lightning-tspipe-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{folder}: the ranks of a job meet in this folder, and it has to be one that only "
            f"this user can open (now: owner {found.st_uid}, mode {stat.filemode(found.st_mode)}). "
            "Remove it, or set TMPDIR to a folder of your own"
        )
    return folder


def entry_name(*parts: str) -> str:
    """The name of a job's entry, from what all its processes know."""
    return _ENTRY + "-".join(re.sub(r"[^\w.]", "_", part) for part in parts if part)


def make_job_folder(name: str) -> Path:
    """On rank 0: a new folder for the job, found by its entry while this process lives.

    Raises:
        ConfigurationError: Another job that has the same entry is running.
    """
    base = private_folder()
    with _alone_in(base):
        _remove_leftovers(base)
        entry = base / name
        if _held(entry) or entry.exists():
            raise ConfigurationError(
                f"another job of this user (process {_holder(entry)}) has the same "
                "address and port. Set MASTER_PORT to another one for each job"
            )
        folder = Path(tempfile.mkdtemp(dir=base, prefix=_WORK))
        file = os.open(entry, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Not flock: a loader's worker would inherit it, and outlive this process.
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(file, f"{folder.name}\n".encode())
        _HELD[name] = _Held(os.getpid(), file, folder.name)
    return folder


def find_job_folder(name: str) -> Path | None:
    """On other ranks: the job's folder; None as long as there is no rank 0 that lives."""
    entry = private_folder() / name
    try:
        text = entry.read_text()
    except FileNotFoundError:
        return None
    return entry.parent / text.strip() if text.endswith("\n") and _holder(entry) else None


def remove_job_folder(folder: Path) -> None:
    """Remove a job's folder and its entry, when all its processes are done with it.

    And what other jobs have left, whose processes were all killed.
    """
    with suppress(OSError, TimeoutError), _alone_in(folder.parent):
        for entry in folder.parent.glob(f"{_ENTRY}*"):
            if _folder_of(entry) == folder.name:
                entry.unlink(missing_ok=True)
                held = _held(entry)
                if held is not None:
                    del _HELD[entry.name]
                    os.close(held.file)
        _remove_leftovers(folder.parent)
    _remove(folder)


def remove_too(folder: Path, rank: int, path: str) -> None:
    """Let a folder of a rank's own be removed with the job's, should the rank not come to it."""
    with suppress(OSError):
        (folder / f"{_WITH_IT}{rank}").write_text(path)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        for note in folder.glob(f"{_WITH_IT}*"):
            other = Path(note.read_text())
            _await_listeners(other)
            shutil.rmtree(other, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _await_listeners(folder: Path) -> None:
    """Until nobody listens at a socket there.

    A loader's worker outlives its rank by some seconds, and complains if its socket is gone.
    """
    deadline = time.monotonic() + _WORKER_SECONDS
    known = Path("/proc/net/unix")
    with suppress(OSError):  # not on this system
        while f"{folder}/" in known.read_text() and time.monotonic() < deadline:
            time.sleep(_PAUSE)


def _folder_of(entry: Path) -> str:
    held = _held(entry)
    return held.folder if held is not None else entry.read_text().strip()


def keep_job_folder(folder: Path) -> None:
    """Let it look used, to those who clean folders for temporary files."""
    with suppress(OSError):
        for path in (folder.parent, folder, *folder.parent.glob(f"{_ENTRY}*"), *folder.iterdir()):
            os.utime(path)


@contextmanager
def _alone_in(base: Path) -> Iterator[None]:
    """No other process makes or removes entries meanwhile.

    Raises:
        TimeoutError: Another process does, and does not come to an end.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    with (base / ".lock").open("w") as file:
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{base / '.lock'}: another process has held this lock for "
                        f"{_LOCK_SECONDS:.0f} s; is it stopped?"
                    ) from None
                time.sleep(_PAUSE)
            else:
                yield
                return


def _remove_leftovers(base: Path) -> None:
    """Of jobs whose processes were killed, all of them."""
    known = set()
    for entry in base.glob(f"{_ENTRY}*"):
        work, holder = _folder_of(entry), _holder(entry)
        lives = holder and not (holder > 0 and Neighbour(holder).is_ending)
        if lives or _is_used(base / work):
            known.add(work)
        else:
            entry.unlink(missing_ok=True)
    for folder in base.glob(f"{_WORK}*"):
        if folder.name not in known:
            _remove(folder)


def _is_used(folder: Path) -> bool:
    """Whether a rank of a job lives, which has lost its rank 0 and tells the others why it ends."""
    for note in folder.glob("member-*"):
        with suppress(OSError, ValueError, KeyError):
            member = json.loads(note.read_text())
            if not Neighbour(member["pid"], member["started"]).is_ending:
                return True
    return False


# Asked, not tried: to take a lock even for a moment would look like a rank 0 to others.
_IS_MAC = sys.platform == "darwin"
_FLOCK = struct.Struct("qqihh" if _IS_MAC else "hhqqi4x")


def _holder(entry: Path) -> int:
    """The process that holds an entry's lock; 0 if none does."""
    held = _held(entry)
    if held is not None:
        return held.pid
    wanted = (fcntl.F_WRLCK, os.SEEK_SET)
    question = _FLOCK.pack(0, 0, 0, *wanted) if _IS_MAC else _FLOCK.pack(*wanted, 0, 0, 0)
    try:
        with entry.open("rb") as file:
            answer = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, question))
    except FileNotFoundError:
        return 0
    kind, pid = (answer[3], answer[2]) if _IS_MAC else (answer[0], answer[4])
    return 0 if kind == fcntl.F_UNLCK else pid or -1
