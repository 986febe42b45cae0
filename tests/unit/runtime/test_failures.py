"""The cause is told once; whoever fails because of it names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path

import pytest

from lightning_tspipe.errors import TransportError
from lightning_tspipe.runtime.faults import failures, local_processes
from lightning_tspipe.runtime.faults.failures import Failures, Found, first_line
from lightning_tspipe.runtime.faults.local_processes import Neighbour, start_of
from lightning_tspipe.runtime.faults.notes import FolderNotes
from lightning_tspipe.runtime.faults.phases import HERE
from lightning_tspipe.runtime.faults.rendezvous import Job

READ_ERROR = "[enforce fail at pair.cc] gloo: Read error [127.0.0.1]:5000: Connection reset by peer"


@pytest.fixture(autouse=True)
def phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "text", "training step 7")


@pytest.fixture(autouse=True)
def hook() -> Iterator[None]:
    previous = sys.excepthook
    yield
    sys.excepthook = previous


@pytest.fixture
def child() -> Iterator[int]:
    """A process that stands for rank 1."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def failures_of(folder: Path, child: int, rank: int = 0, *, ends_last: bool = False) -> Failures:
    """Of rank 0, which is this process; or of another one, for which this process stands in."""
    job = Job(rank, 3, FolderNotes(folder), folder)
    job.publish()
    other = replace(job.this, rank=1, pid=child, started=start_of(child))
    if rank != 1:
        job.notes.claim("member/1", dumps(asdict(other)))
    job.num_begun = 3
    return Failures(job, ends_last=ends_last)


def said(exception: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """What the end of the process by an exception prints."""
    sys.excepthook(type(exception), exception, None)
    return capsys.readouterr().err


def test_the_first_is_the_cause(
    tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = failures_of(tmp_path, child), failures_of(tmp_path, child, rank=2)
    mistake, another = ValueError("a mistake"), KeyError("another")
    first.settle(mistake)
    text = said(mistake, capsys)
    assert "ValueError: a mistake" in text  # where a traceback would be
    assert f"The job ends, because rank 0 (pid {os.getpid()} on " in text
    assert "raised ValueError in training step 7: a mistake" in text
    second.settle(another)
    text = said(another, capsys)
    assert text.startswith("rank 2 stops too: KeyError: 'another' (the cause: rank 0 (pid ")
    assert "The job ends" not in text


@pytest.mark.parametrize("error", [TransportError("nothing from rank 1"), RuntimeError(READ_ERROR)])
def test_a_killed_rank_is_named_by_whoever_loses_the_connection(
    error: Exception, tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = failures_of(tmp_path, child)
    os.kill(child, signal.SIGKILL)
    failures.settle(error)
    cause = f"rank 1 (pid {child} on {os.uname().nodename}) was killed by SIGKILL in "
    assert f"The job ends, because {cause}" in capsys.readouterr().err
    text = said(error, capsys)
    assert text.startswith(f"rank 0 stops too: {str(error).splitlines()[0]} (the cause: {cause}")
    assert "Traceback" not in text


def test_who_waits_in_vain_for_one_that_lives_tells_so(
    tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failures, others = failures_of(tmp_path, child), failures_of(tmp_path, child, rank=2)
    (tmp_path / "phase-1").write_text("the validation")
    error, same = TransportError("nothing from rank 1"), TransportError("nothing from rank 0")
    failures.settle(error)
    told = said(error, capsys)
    assert "gave up waiting in training step 7: nothing from rank 1; rank 1 (pid " in told
    assert ") is in the validation. If a rank is just slow" in told
    others.settle(same)
    text = said(same, capsys)
    assert text.startswith("rank 2 stops too: nothing from rank 0 (the cause: rank 0 (pid ")


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation",
         "nothing came from another rank within 6 s"),
        ("[/x/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer",
         "another rank closed its connection"),
        ("[/x/gloo/transport/tcp/pair.cc:99] something new\nGLHF!", "something new"),
        ("[not of gloo] Read error", "[not of gloo] Read error"),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_what_gloo_says_is_told_in_plain_words(text: str, plain: str) -> None:
    assert first_line(RuntimeError(text)) == plain


def test_who_has_met_nobody_tells_what_it_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    error = TransportError("rank 0 did not join within 8 s")
    Failures(Job(1)).settle(error)
    assert said(error, capsys).startswith(f"The job ends, because {error}")


def test_it_is_told_at_once_where_no_hook_is_asked(
    tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in workers of multiprocessing."""
    first, second = failures_of(tmp_path, child), failures_of(tmp_path, child, rank=2)
    mistake, another = ValueError("a mistake"), KeyError("another")
    first.settle(mistake)
    second.settle(another)
    assert not first.tell_now(mistake)
    assert second.tell_now(another)
    assert not second.tell_now(mistake)
    text = capsys.readouterr().err
    assert text.count("The job ends, because") == text.count("stops too") == 1
    assert text.count("ValueError: a mistake") == 1


def test_one_that_lets_the_cause_end_first_has_said_that_it_is_done(
    tmp_path: Path, child: int
) -> None:
    mistake, consequence = ValueError("a mistake"), TransportError("nothing from rank 0")
    failures_of(tmp_path, child).settle(mistake)
    last = failures_of(tmp_path, child, rank=2, ends_last=True)
    lets = threading.Thread(target=last.settle, args=(consequence,))
    lets.start()
    deadline = time.monotonic() + 3
    while not (tmp_path / "run-3-over-2").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lets.is_alive()  # this process, which stands for rank 0, has not ended
    lets.join()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_when_the_cause_ends_it_kills_those_that_are_stopped(
    is_stopped: bool, tmp_path: Path, child: int
) -> None:
    """And waits for no other: they may be waiting for its connections to close."""
    failures = failures_of(tmp_path, child)
    neighbour = Neighbour(child, start_of(child))
    if is_stopped:
        os.kill(child, signal.SIGSTOP)
        until(lambda: neighbour.is_stopped)
    failures.settle(ValueError("a mistake"))
    started = time.monotonic()
    failures._end_the_stopped()
    assert time.monotonic() - started < 2
    if is_stopped:
        until(lambda: neighbour.has_ended)
    assert neighbour.has_ended == is_stopped


def test_one_that_is_stopped_is_killed_when_it_is_told(
    tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the line says; who tells it may end much later."""
    failures, neighbour = failures_of(tmp_path, child), Neighbour(child, start_of(child))
    os.kill(child, signal.SIGSTOP)
    until(lambda: neighbour.is_stopped)
    failures._tell(Found("rank 1 was stopped", "It is killed now", 1, neighbour))
    assert "The job ends, because rank 1 was stopped. It is killed now" in capsys.readouterr().err
    until(lambda: neighbour.has_ended)


def test_one_that_did_not_notice_says_where_it_was(
    tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures_of(tmp_path, child).settle(ValueError("a mistake"))
    unaware = failures_of(tmp_path, child, rank=2)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(Job, "leave", lambda _: None)
    ending = threading.Timer(0.2, unaware._end)
    ending.start()
    until(lambda: bool(codes))  # of this file: here the main thread is then
    ending.join()
    assert codes == [1]
    text = capsys.readouterr().err
    assert text.startswith(f"rank 2 (pid {os.getpid()} on ")
    assert "(the cause: rank 0 (pid " in text
    assert "It was here, in training step 7:\n" in text
    assert test_one_that_did_not_notice_says_where_it_was.__name__ in text


def test_one_that_waits_for_others_needs_no_stack(
    tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures_of(tmp_path, child).settle(ValueError("a mistake"))
    waiting = failures_of(tmp_path, child, rank=2)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(Job, "leave", lambda _: None)
    ending = threading.Timer(0.2, waiting._end)
    ending.start()
    local_processes.until(lambda: codes, 30)
    ending.join()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rank 2 stops too: it waited in training step 7 (the cause: rank 0 (pid")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_that_ends_a_rank_is_told_if_nothing_has_failed_before(
    tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher ends the others by it, right after one has failed."""
    first, second = failures_of(tmp_path, child), failures_of(tmp_path, child, rank=2)
    first.tell_of_signal(signal.SIGTERM)
    text = capsys.readouterr().err
    assert f"The job ends, because rank 0 (pid {os.getpid()} on " in text
    assert "was ended by SIGTERM in training step 7" in text
    second.tell_of_signal(signal.SIGTERM)
    assert not capsys.readouterr().err


def test_a_signal_before_all_have_met_is_told_by_who_has_launched_the_ranks(
    tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends those that wait, when one has failed that they don't know."""
    failures_of(tmp_path, child).tell_of_signal(signal.SIGTERM)  # rank 2 has not come
    assert not capsys.readouterr().err


def test_a_signal_is_no_cause_where_another_rank_was_killed(
    tmp_path: Path, child: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = failures_of(tmp_path, child)
    neighbour = Neighbour(child, start_of(child))
    os.kill(child, signal.SIGKILL)
    until(lambda: neighbour.has_ended)
    failures.tell_of_signal(signal.SIGTERM)
    text = capsys.readouterr().err
    assert "rank 1" in text
    assert "was killed by SIGKILL" in text
    assert "SIGTERM" not in text


def test_a_second_ctrl_c_ends_the_wait_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_PATIENCE", 3600.0)
    sleeps = [sys.executable, "-c", "import time; time.sleep(3600)"]
    children = [subprocess.Popen(sleeps) for _ in range(2)]  # noqa: S603
    # Lightning ignores the signal once a fit has been interrupted, in another test for instance.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    failures._end(children)
    signal.signal(signal.SIGINT, before)
    assert [child.returncode for child in children] == [-signal.SIGKILL] * 2
