"""A folder of this user, in which processes of one machine find each other.

It holds an *entry* for each job, which names the job's folder, and is locked by the job's rank 0 as
long as that lives: so nobody joins what a killed job has left behind. ::

    <temporary folder>/lightning-tspipe-1000/       only this user can open it
        job-node7-29500-3f1c        "work-x7k2", locked by rank 0
        work-x7k2/                  the store, notes, who is where
        job-launch-9ab2             "work-p3q8", locked by the process that starts the ranks
        work-p3q8/                  its temporary files
        job-alone-4711              "work-m5d1", locked by the one rank of a job
        work-m5d1/                  where that has other temporary files
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import current_process, forkserver, util
from pathlib import Path
from typing import TextIO

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.faults.local_processes import Neighbour, until

_ENTRY, _WORK, _WITH_IT = "job-", "work-", "also-"
_LOCK_SECONDS = 30.0
_WORKER_SECONDS = 12.0
"""A worker of torch's loaders asks every 5 s whether its rank is still there."""
_INODE = 6
"""Place of a socket's number in a line of ``/proc/net/unix``."""


_HELD: dict[str, tuple[int, str]] = {}
"""Entries that this process has locked: the open file that holds the lock, and what they name.

To close another opening of the same file would give up the lock: nothing asks the file.
"""
os.register_at_fork(after_in_child=_HELD.clear)


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
        if entry.exists():
            raise ConfigurationError(
                f"another job of this user (process {_holder(entry)}) has the same "
                "address and port. Set MASTER_PORT to a different one for each job"
            )
        folder = Path(tempfile.mkdtemp(dir=base, prefix=_WORK))
        file = os.open(entry, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Not flock: a loader's worker would inherit it, and outlive this process.
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(file, f"{folder.name}\n".encode())
        _HELD[name] = file, folder.name
    return folder


def find_job_folder(name: str) -> Path | None:
    """On other ranks: the job's folder; None as long as there is no rank 0 that lives."""
    entry = private_folder() / name
    with suppress(FileNotFoundError):
        text = entry.read_text()
        if text.endswith("\n") and _holder(entry):
            return entry.parent / text.strip()
    return None


def remove_job_folder(folder: Path) -> None:
    """Remove a job's folder and its entry, when all its processes are done with it.

    And what other jobs have left, whose processes were all killed.
    """
    with suppress(OSError, TimeoutError), _alone_in(folder.parent):
        for entry in folder.parent.glob(f"{_ENTRY}*"):
            if _folder_of(entry) == folder.name:
                entry.unlink(missing_ok=True)
                if entry.name in _HELD:
                    os.close(_HELD.pop(entry.name)[0])
        _remove_leftovers(folder.parent)
    _remove(folder)


def make_temporary_folder(folder: Path, rank: int) -> None:
    """Make this process's own folder for sockets; it is removed with the job's, if not before.

    As multiprocessing makes it, but noted before it is there: a rank may be killed at any moment.
    """
    path = Path(tempfile.gettempdir(), f"pymp-{secrets.token_hex(4)}")
    remove_too(folder, rank, str(path))
    path.mkdir(0o700)
    util.Finalize(None, shutil.rmtree, (path, True), exitpriority=-100)
    current_process()._config["tempdir"] = str(path)  # type: ignore[attr-defined] # noqa: SLF001


def remove_too(folder: Path, rank: int, path: str) -> None:
    """Let a folder of a rank's own be removed with the job's, should the rank not come to it."""
    with suppress(OSError):
        (folder / f"{_WITH_IT}{rank}").write_text(path)


def shared_temporary_folder() -> str:
    """The folder for sockets that this process and its children have in common; made if need be.

    The process that made it removes it at its end; should it be killed, the user's next job does.
    A job of several ranks has ranks that do (see ``remove_too``); one rank has nobody else.
    """
    if not has_shared_temporary_folder():
        with suppress(OSError, TimeoutError, ConfigurationError):
            folder = make_job_folder(entry_name("alone", str(os.getpid())))
            # After this process has removed its own temporary files (-100).
            util.Finalize(None, remove_job_folder, (folder,), exitpriority=-101)
            make_temporary_folder(folder, 0)
        # Before it is removed (-100): workers of a rank that was killed outlive this process.
        util.Finalize(None, _await_listeners, (Path(util.get_temp_dir()),), exitpriority=-99)
    return util.get_temp_dir()


def has_shared_temporary_folder() -> bool:
    """Whether it is there: this process has made it, or the one that has started this process."""
    return "tempdir" in current_process()._config  # type: ignore[attr-defined] # noqa: SLF001


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
    # This process's fork server ends behind it.
    server = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined] # noqa: SLF001

    def others_listen(own: set[str]) -> bool:
        lines = map(str.split, Path("/proc/net/unix").read_text().splitlines())
        found = (words for words in lines if words[-1].startswith(f"{folder}/"))
        return any(f"socket:[{w[_INODE]}]" not in own and w[-1] != server for w in found)

    with suppress(OSError):  # not on this system
        files = Path("/proc/self/fd").iterdir()
        own = {os.readlink(path) for path in files if path.is_symlink()}  # noqa: PTH115 - no file
        until(lambda: not others_listen(own), _WORKER_SECONDS)


def _folder_of(entry: Path) -> str:
    return _HELD[entry.name][1] if entry.name in _HELD else entry.read_text().strip()


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
    with (base / ".lock").open("w") as file:
        if not until(partial(_locks, file), _LOCK_SECONDS):
            raise TimeoutError(
                f"{base / '.lock'}: another process has held this lock for {_LOCK_SECONDS:.0f} s; "
                "is it stopped?"
            )
        yield


def _locks(file: TextIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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
    """Whether somebody lives who has lost the job's rank 0.

    A rank, which tells the others why it ends, or whoever launched them, who reads that in the end.
    """
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
    if entry.name in _HELD:
        return os.getpid()
    wanted = (fcntl.F_WRLCK, os.SEEK_SET)
    question = _FLOCK.pack(0, 0, 0, *wanted) if _IS_MAC else _FLOCK.pack(*wanted, 0, 0, 0)
    try:
        with entry.open("rb") as file:
            answer = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, question))
    except FileNotFoundError:
        return 0
    kind, pid = (answer[3], answer[2]) if _IS_MAC else (answer[0], answer[4])
    return 0 if kind == fcntl.F_UNLCK else pid or -1
