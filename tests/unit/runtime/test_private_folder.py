"""Where the ranks of a machine meet: for this user only, and never in what a dead job has left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.faults.local_processes import start_of
from lightning_tspipe.runtime.faults.notes import FolderNotes
from lightning_tspipe.runtime.faults.private_folder import (
    _WORKER_SECONDS,
    entry_name,
    find_job_folder,
    make_job_folder,
    make_temporary_folder,
    private_folder,
    remove_job_folder,
    remove_too,
    shared_temporary_folder,
)
from lightning_tspipe.runtime.faults.rendezvous import HEIR, Job, tidy_before_sigterm

NAME = entry_name("node", "29500")
_CONTEXT = multiprocessing.get_context("fork")  # to import it all again takes seconds
SECONDS = 60


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Children inherit it, if another test has had multiprocessing make one.
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]
    yield tmp_path
    for folder in private_folder().glob("work-*"):
        remove_job_folder(folder)


def other_rank_0(temporary: Path, name: str, end: Connection) -> None:
    """Another process, which makes a job's folder and keeps it as long as it lives."""
    tempfile.tempdir = str(temporary)
    try:
        end.send(make_job_folder(name))
    except ConfigurationError as error:
        end.send(str(error))
    end.poll(SECONDS)


def start(temporary: Path, name: str = NAME) -> tuple[Any, Connection]:
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=other_rank_0, args=(temporary, name, there))
    process.start()
    return process, here


def received(end: Connection) -> Path | str:
    assert end.poll(SECONDS)
    found: Path | str = end.recv()
    return found


def test_only_this_user_may_open_it() -> None:
    found = private_folder().stat()
    assert found.st_uid == os.getuid()
    assert found.st_mode & 0o777 == 0o700


def test_one_that_others_may_open_is_refused() -> None:
    private_folder().chmod(0o755)
    with pytest.raises(ConfigurationError, match="only this user can open"):
        private_folder()
    private_folder_path(0o700)


def private_folder_path(mode: int) -> None:
    (Path(tempfile.gettempdir()) / f"lightning-tspipe-{os.getuid()}").chmod(mode)


def test_one_of_somebody_else_is_refused(temporary: Path, tmp_path: Path) -> None:
    """Who links to a place of his own, or makes it first."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    ours = temporary / f"lightning-tspipe-{os.getuid()}"
    ours.symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="set TMPDIR"):
        private_folder()
    ours.unlink()


def test_one_that_another_user_has_made_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under our name, though its mode is right: who owns it may read what lies in it."""
    ours = os.getuid()
    made = temporary / f"lightning-tspipe-{ours + 1}"
    made.mkdir(mode=0o700)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: ours + 1)
        with pytest.raises(ConfigurationError, match=f"now: owner {ours}, mode drwx------"):
            private_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_can_not_read_in_it(temporary: Path) -> None:
    folder = make_job_folder(NAME)
    (folder / "store").write_text("keys")
    for path in (temporary, *temporary.parents):
        if path.stat().st_mode & 0o005 != 0o005 and path.is_relative_to(tempfile.gettempdir()):
            path.chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            os.stat(folder / "store")  # noqa: PTH116 - nothing of this process's past counts
        except PermissionError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_ranks_find_it_while_rank_0_lives(temporary: Path) -> None:
    assert find_job_folder(NAME) is None
    process, end = start(temporary)
    folder = received(end)
    assert find_job_folder(NAME) == folder
    assert find_job_folder(entry_name("node", "29501")) is None
    process.kill()
    process.join()
    assert find_job_folder(NAME) is None
    assert isinstance(folder, Path)
    assert folder.exists()  # what it has left behind


def test_a_later_job_removes_what_a_killed_one_has_left(temporary: Path) -> None:
    process, end = start(temporary)
    killed = received(end)
    process.kill()
    process.join()
    folder = make_job_folder(NAME)
    assert {path.name for path in private_folder().glob("work-*")} == {folder.name}
    assert folder != killed


def test_a_job_that_lives_keeps_its_own(temporary: Path) -> None:
    process, end = start(temporary)
    other = received(end)
    assert isinstance(other, Path)
    folder = make_job_folder(entry_name("node", "29501"))
    assert other.exists()
    remove_job_folder(folder)
    assert other.exists()
    assert not folder.exists()
    assert find_job_folder(NAME) == other
    end.send("")
    process.join()


def test_two_jobs_with_one_port_are_told(temporary: Path) -> None:
    folder = make_job_folder(NAME)
    process, end = start(temporary)
    text = received(end)
    assert isinstance(text, str)
    assert f"(process {os.getpid()}) has the same address and port. Set MASTER_PORT" in text
    assert folder.exists()
    end.send("")
    process.join()


def test_when_all_are_done_nothing_is_left(temporary: Path) -> None:
    remove_job_folder(make_job_folder(NAME))
    assert {path.name for path in private_folder().iterdir()} == {".lock"}
    assert make_job_folder(NAME).exists()


def test_what_it_holds_itself_it_does_not_open() -> None:
    """A process gives up its lock when it closes the file, whoever opened it."""
    launch = make_job_folder(entry_name("launch"))
    job = make_job_folder(NAME)
    remove_job_folder(job)
    assert launch.exists()
    other = _CONTEXT.Process(target=remove_job_folder, args=(job,))  # and all that is left over
    other.start()
    other.join(SECONDS)
    assert other.exitcode == 0
    assert launch.exists()


def test_who_is_forked_holds_nothing(temporary: Path) -> None:
    process, end = start(temporary)
    folder = received(end)
    assert isinstance(folder, Path)
    child = _CONTEXT.Process(target=_removes_leftovers, args=(process.pid, folder))
    child.start()
    child.join(SECONDS)
    process.join()
    assert child.exitcode == 0


def _removes_leftovers(pid: int, left: Path) -> None:
    os.kill(pid, signal.SIGKILL)
    folder = make_job_folder(entry_name("node", "29502"))
    remove_job_folder(folder)
    assert not left.exists()


def test_folders_of_ranks_go_with_the_job_s(tmp_path: Path) -> None:
    own = tmp_path / "pymp-of-a-killed-rank"
    own.mkdir()
    folder = make_job_folder(NAME)
    remove_too(folder, 1, str(own))
    remove_job_folder(folder)
    assert not own.exists()


def _keeps(temporary: Path, end: Connection) -> None:
    """A job of one rank, whose loader has workers."""
    tempfile.tempdir = str(temporary)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tidy_before_sigterm()
    own = shared_temporary_folder()
    child = _CONTEXT.Process(target=shared_temporary_folder)
    child.start()
    child.join()
    assert shared_temporary_folder() == own
    end.send((own, len(list(private_folder().glob("work-*")))))
    end.poll(SECONDS)


@pytest.mark.parametrize("how", ["killed", "terminated", "ends"])
def test_the_folder_of_a_rank_that_was_alone_goes_with_it_or_the_next_job(
    how: str, temporary: Path
) -> None:
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_keeps, args=(temporary, there))
    process.start()
    assert here.poll(SECONDS)
    path, number = here.recv()
    own = Path(path)
    assert number == 1
    remove_job_folder(make_job_folder(NAME))
    assert own.exists()  # it lives, and so did it after its child's end
    if how == "ends":
        here.send("")
    else:
        os.kill(process.pid or 0, signal.SIGKILL if how == "killed" else signal.SIGTERM)
    process.join()
    assert process.exitcode == {"killed": -9, "terminated": -15, "ends": 0}[how]
    assert own.exists() == (how == "killed")
    assert len(list(private_folder().glob("work-*"))) == (how == "killed")
    remove_job_folder(make_job_folder(NAME))
    assert not own.exists()
    assert {path.name for path in private_folder().iterdir()} == {".lock"}


def _listens(place: Path, end: Connection) -> None:
    """A loader's worker: it outlives its rank by some seconds, and removes its socket then."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(place))
    listening.listen()
    end.send(None)
    time.sleep(0.5)
    end.send(place.exists())
    listening.close()


def test_a_socket_is_not_removed_while_somebody_listens(temporary: Path) -> None:
    folder = make_job_folder(NAME)
    own = temporary / "pymp-of-rank-1"
    own.mkdir()
    remove_too(folder, 1, str(own))
    here, there = _CONTEXT.Pipe()
    worker = _CONTEXT.Process(target=_listens, args=(own / "listener", there))
    worker.start()
    assert here.poll(SECONDS)
    here.recv()
    began = time.monotonic()
    with socket.socket(socket.AF_UNIX) as ours:  # a process need not wait for itself
        ours.bind(str(own / "ours"))
        ours.listen()
        remove_job_folder(folder)
    assert time.monotonic() - began < _WORKER_SECONDS
    assert here.recv()
    assert not own.exists()
    worker.join()


def _launches(temporary: Path, end: Connection) -> None:
    """Has a folder that workers of its killed ranks use, and ends."""
    tempfile.tempdir = str(temporary)
    end.send(shared_temporary_folder())
    end.poll(SECONDS)


def test_nor_where_the_process_ends_that_has_made_the_folder(temporary: Path) -> None:
    here, there = _CONTEXT.Pipe()
    launcher = _CONTEXT.Process(target=_launches, args=(temporary, there))
    launcher.start()
    assert here.poll(SECONDS)
    own = Path(here.recv())
    from_worker, to_us = _CONTEXT.Pipe()
    worker = _CONTEXT.Process(target=_listens, args=(own / "listener", to_us))
    worker.start()
    assert from_worker.poll(SECONDS)
    from_worker.recv()
    here.send("")
    launcher.join()
    assert from_worker.recv()
    assert not own.exists()
    worker.join()


def test_a_job_that_has_lost_its_rank_0_keeps_it_to_its_end(temporary: Path) -> None:
    process, end = start(temporary)
    folder = received(end)
    assert isinstance(folder, Path)
    member = _CONTEXT.Process(target=time.sleep, args=(SECONDS,))
    member.start()
    told = {"pid": member.pid, "started": start_of(member.pid or 0)}
    (folder / "member-1").write_text(json.dumps(told))
    process.kill()
    process.join()
    remove_job_folder(make_job_folder(entry_name("node", "29503")))
    assert folder.exists()
    member.kill()
    member.join()
    remove_job_folder(make_job_folder(entry_name("node", "29503")))
    assert not folder.exists()


def test_what_ranks_have_told_is_kept_for_whoever_launched_them(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, end = start(temporary)
    folder = received(end)
    assert isinstance(folder, Path)
    launcher = _CONTEXT.Process(target=time.sleep, args=(SECONDS,))
    launcher.start()
    monkeypatch.setenv(HEIR, f"{launcher.pid} {start_of(launcher.pid or 0)}")
    Job(1, 2, FolderNotes(folder), folder).publish()
    (folder / "member-1").unlink()  # it ends, too
    process.kill()
    process.join()
    remove_job_folder(make_job_folder(entry_name("node", "29503")))
    assert folder.exists()
    launcher.kill()
    launcher.join()
    remove_job_folder(make_job_folder(entry_name("node", "29503")))
    assert not folder.exists()


def _is_killed_in_the_making(temporary: Path, folder: Path) -> None:
    tempfile.tempdir = str(temporary)

    def kill(path: Path, mode: int) -> None:
        os.mkdir(path, mode)  # noqa: PTH102 - what it replaces
        os.kill(os.getpid(), signal.SIGKILL)

    Path.mkdir = kill  # type: ignore[assignment,method-assign]
    make_temporary_folder(folder, 1)


def test_a_rank_that_is_killed_as_it_makes_its_folder(temporary: Path) -> None:
    folder = make_job_folder(NAME)
    process = _CONTEXT.Process(target=_is_killed_in_the_making, args=(temporary, folder))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(temporary.glob("pymp-*"))
    remove_job_folder(folder)
    assert not list(temporary.glob("pymp-*"))


def test_its_own_folder_goes_with_a_process_that_ends(temporary: Path) -> None:
    folder = make_job_folder(NAME)
    process = _CONTEXT.Process(target=_ends_with_a_folder, args=(temporary, folder))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert not list(temporary.glob("pymp-*"))
    remove_job_folder(folder)


def _ends_with_a_folder(temporary: Path, folder: Path) -> None:
    tempfile.tempdir = str(temporary)
    make_temporary_folder(folder, 1)
    (own,) = temporary.glob("pymp-*")
    assert util.get_temp_dir() == str(own)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def _has_a_worker_and_forks(end: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tidy_before_sigterm()
    worker = _CONTEXT.Process(target=time.sleep, args=(SECONDS,), daemon=True)
    worker.start()
    seen, says = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(says, b"x")  # a signal before this is forgotten: Python clears them as it forks
        time.sleep(SECONDS)
        os._exit(1)
    os.read(seen, 1)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    worker.join(0.5)
    end.send((os.waitstatus_to_exitcode(status), worker.is_alive()))
    worker.kill()
    worker.join()


def test_a_forked_process_leaves_the_workers_of_its_origin_alone() -> None:
    here, there = _CONTEXT.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_has_a_worker_and_forks, args=(there,)
    )
    process.start()
    assert here.poll(SECONDS)
    assert here.recv() == (-signal.SIGTERM, True)
    process.join()
