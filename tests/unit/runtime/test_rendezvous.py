"""A process that a signal ends leaves its job as any other does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import pytest

from lightning_tspipe.runtime.faults.private_folder import remove_too
from lightning_tspipe.runtime.faults.rendezvous import (
    current_job,
    end_by,
    meet,
)

SECONDS = 3.0
PATIENCE = timedelta(seconds=10)


def listen(ready: Connection, folder: Path | None = None) -> None:
    """As a worker of a loader does, which has no folder of its own, or one of a rank's."""
    with Listener(folder and str(folder / "socket"), family="AF_UNIX"):
        ready.send(None)
        time.sleep(SECONDS)


def in_a_child(port: int, how: str) -> int:
    """Meet as the only rank, and be ended; the status of the process."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        job = meet(port, 0, 1, PATIENCE, on_one_machine=True)
        assert current_job() is job
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        context.Process(target=listen, args=(there,), daemon=True).start()
        here.recv()
        told = Path(tempfile.gettempdir()) / "told"
        job.tell = lambda signum: print(int(signum), file=told.open("w"), end="", flush=True)
        if how == "by another process":
            os.kill(os.getpid(), signal.SIGTERM)
        elif how == "while it ends":
            assert job.folder is not None
            own = Path(tempfile.mkdtemp())
            remove_too(job.folder, 1, str(own))
            context.Process(target=listen, args=(there, own)).start()
            here.recv()
            threading.Timer(SECONDS / 3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            util._run_finalizers()  # type: ignore[attr-defined]
            os._exit(0)
        else:
            end_by(signal.SIGTERM)
    finally:
        os._exit(1)


@pytest.mark.parametrize("how", ["by another process", "by itself"])
def test_sigterm_ends_it_with_its_folder_removed(
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And its children before, whose sockets are in a folder of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "LIGHTNING_TSPIPE_PARENT"):
        monkeypatch.delenv(name, raising=False)
    status = in_a_child(29500, how)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert (tmp_path / "told").read_text() == str(int(signal.SIGTERM))
    (ours,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert [path.name for path in ours.iterdir()] == [".lock"]
    assert "Traceback" not in capfd.readouterr().err


def test_what_it_is_removing_goes_though_a_sigterm_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun sends one, while this rank waits for the worker of another that was killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "LIGHTNING_TSPIPE_PARENT"):
        monkeypatch.delenv(name, raising=False)
    status = in_a_child(29501, "while it ends")
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    left = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    assert {path.name for path in left} == {"told", ".lock", f"lightning-tspipe-{os.getuid()}"}
