"""What becomes of workers, of which one has failed, and what is remembered of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults.local_processes import start_of
from lightning_tspipe.runtime.faults.rendezvous import HEIR
from lightning_tspipe.strategy.lightning import launching
from lightning_tspipe.strategy.lightning.launching import (
    InWorker,
    _last_words,
    _launcher_class,
    _PassedOn,
    _Workers,
)
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces


class Workers:
    """Stands for Lightning's launcher."""

    fails = True
    procs: tuple[Any, ...] = ()

    def launch(self, function: Any, *_args: Any, **_kwargs: Any) -> str:
        if self.fails:
            raise RuntimeError("a worker failed")
        return "done"


class Strategy(SimpleNamespace):
    """Stands for a strategy."""

    namespace = installed_namespaces()[0]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def launcher_over(base: type) -> Any:
    launcher: Any = _launcher_class("Launcher", _Workers, base)()
    launcher._start_method = "fork"
    launcher._strategy = Strategy(
        have_workers_failed=False,
        cluster_environment=SimpleNamespace(main_port=29500),
    )
    return launcher


def test_a_worker_that_was_just_forked_is_ended_by_its_own_sigterm() -> None:
    """It has its parent's handler still, which would pass the signal on to nobody."""
    with _PassedOn(launcher_over(Workers)).during():
        pid = os.fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_a_worker_whose_parent_has_ended_before_its_first_line_runs_nothing(tmp_path: Path) -> None:
    """Killed right after the fork, before the worker could ask to be ended with it."""
    gone = os.fork()
    if not gone:
        time.sleep(60)
        os._exit(0)
    parent = f"{gone} {start_of(gone) or 0}"
    os.kill(gone, signal.SIGKILL)
    os.waitpid(gone, 0)
    pid = os.fork()
    if not pid:
        try:
            InWorker((tmp_path / "ran").touch, "fork", parent=parent)()
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert not (tmp_path / "ran").exists()


def test_another_fit_starts_as_if_none_had_failed() -> None:
    launcher = launcher_over(Workers)
    with pytest.raises(RuntimeError, match="a worker failed"):
        launcher.launch(print)
    assert launcher._strategy.have_workers_failed
    launcher.fails = False
    assert launcher.launch(print) == "done"
    assert not launcher._strategy.have_workers_failed


class Leaving(Workers):
    """Leaves a file, as torch does of a traceback, and Lightning of weights."""

    def launch(self, *args: Any, **kwargs: Any) -> str:
        self.place = Path(tempfile.gettempdir())
        (self.place / "traceback").touch()
        return super().launch(*args, **kwargs)


def test_temporary_files_of_a_launch_are_removed_with_it(tmp_path: Path) -> None:
    launcher = launcher_over(Leaving)
    with pytest.raises(RuntimeError, match="a worker failed"):
        launcher.launch(print)
    assert tmp_path in launcher.place.parents
    assert not launcher.place.exists()
    assert tempfile.gettempdir() == str(tmp_path)
    (ours,) = tmp_path.iterdir()
    assert [path.name for path in ours.iterdir()] == [".lock"]


def worker_with(code: int | None, kill: Callable[[], None] = lambda: None) -> Any:
    return SimpleNamespace(
        _popen=SimpleNamespace(returncode=code), kill=kill, is_alive=lambda: False
    )


class Interrupted(Workers):
    """Ctrl-C ends the wait for workers, which have heard it too and tidy up."""

    def __init__(self) -> None:
        self.looks = 0
        self.is_killed = Event()

    def is_alive(self) -> bool:
        self.looks += 1
        return not self.is_killed.is_set() if self.hangs else self.looks < 3

    hangs = False

    def launch(self, *_args: Any, **_kwargs: Any) -> str:
        worker = worker_with(None, self.is_killed.set)
        worker.is_alive = self.is_alive
        self.procs = (worker,)
        raise KeyboardInterrupt


@pytest.mark.parametrize("hangs", [False, True])
def test_ctrl_c_waits_for_workers_a_while(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_GRACE", 0.1 if hangs else 30)
    launcher = launcher_over(Interrupted)
    launcher.hangs = hangs
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(print)
    assert launcher.looks > 2
    assert launcher.is_killed.is_set() == hangs


class Impatient(Interrupted):
    """Ctrl-C again, while a worker tidies up."""

    def is_alive(self) -> bool:
        if self.looks == 0:
            self.looks += 1
            raise KeyboardInterrupt
        return not self.is_killed.is_set()


def test_a_second_ctrl_c_kills_the_workers_and_leaves_nothing(tmp_path: Path) -> None:
    launcher = launcher_over(Impatient)
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(print)
    assert launcher.is_killed.is_set()
    (ours,) = tmp_path.iterdir()
    assert [path.name for path in ours.iterdir()] == [".lock"]


class Waiting(Workers):
    """Waits for a worker as torch does, whatever its exit code; here, until one is killed."""

    exit_code: int | None = None
    seconds = 30.0

    def launch(self, *_args: Any, **_kwargs: Any) -> str:
        is_killed = Event()
        codes = (self.exit_code, None)
        self.procs = tuple(worker_with(code, is_killed.set) for code in codes)
        return "killed" if is_killed.wait(self.seconds) else "left"


def test_a_worker_that_is_stopped_is_killed_after_another_one_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request to end reaches it."""
    monkeypatch.setattr(launching, "_GRACE", 0.1)
    launcher = launcher_over(Waiting)
    launcher.exit_code = 1
    assert launcher.launch(print) == "killed"
    launcher.exit_code, launcher.seconds = None, 1.0
    assert launcher.launch(print) == "left"


class Ended(Workers):
    """Tells of a worker's exit code as torch does."""

    exit_code = 1

    def launch(self, *_args: Any, **_kwargs: Any) -> str:
        name = "SIGTERM" if self.exit_code < 0 else None
        raise ProcessExitedException("it has ended", 1, 1234, self.exit_code, name)


@pytest.mark.parametrize(
    ("code", "told"),
    [(143, ""), (-15, "The job ends, because rank 1 (pid 1234 on "), (1, "")],
)
def test_sigterm_to_a_worker_ends_the_parent_as_one_to_the_parent(
    code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also to one that does not handle signals yet, and so has told nobody."""
    launcher = launcher_over(Ended)
    launcher.exit_code = code
    expected = ProcessExitedException if code == 1 else Strategy.namespace.sigterm_exception
    hook = sys.excepthook
    with pytest.raises(expected):
        launcher.launch(print)
    sys.excepthook = hook
    text = capsys.readouterr().err
    assert text.startswith(told)
    assert bool(text) == bool(told)


class Starting(Workers):
    """Is ended while it starts workers, as the one before does after that."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.is_told = Event()

    def kill(self, signum: int) -> None:
        self.signals.append(signum)
        self.is_told.set()

    def launch(self, *_args: Any, **_kwargs: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        assert self.signals == []
        self.procs = (worker_with(None),)
        assert self.is_told.wait(30)
        return "stopped"


def test_sigterm_while_workers_are_started_reaches_them_when_they_are_there() -> None:
    """The parent would wait for those that it has started, and they for the others."""
    launcher = launcher_over(Starting)
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(Strategy.namespace.sigterm_exception):
            launcher.launch(print)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert launcher.signals == [signal.SIGTERM]


class Told(SimpleNamespace):
    """Stands for a job of which ranks have told causes."""

    def told_causes(self) -> list[int]:
        return []

    def phase_of(self, _rank: int) -> str:
        return "the start-up"


def test_of_a_rank_that_has_met_nobody_there_is_the_cause_and_no_traceback() -> None:
    trace = "Traceback (most recent call last):\n  File ...\n"
    ours, own = (
        f"{TransportError.__module__}.TransportError: rank 0 did not join",
        "ValueError: mine",
    )
    assert _last_words(ProcessRaisedException(f"error:\n{trace}{ours}", 2, 7), Told()) == (  # type: ignore[arg-type]
        "The job ends, because rank 0 did not join"
    )
    words = _last_words(ProcessRaisedException(f"error:\n{trace}{own}", 2, 7), Told())  # type: ignore[arg-type]
    assert words.startswith(trace)
    assert "because rank 2 (pid 7 on" in words


@pytest.mark.slow
def test_results_are_for_a_parent_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that was killed the folder is gone in which they would lie."""
    module = "lightning_tspipe.runtime.faults.local_processes"
    code = f"import {module} as parents; print(parents.signed_by_this_process())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    monkeypatch.setenv(HEIR, ended.stdout.strip())
    with pytest.raises(SystemExit, match="1"):
        launcher_over(Workers)._collect_rank_zero_results(None, None)
