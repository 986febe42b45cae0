from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from lightning_tspipe.runtime.faults.local_processes import Neighbour, start_of

SLEEPS = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPS)  # noqa: S603 - our own words
    yield process
    process.kill()
    process.wait()


@pytest.fixture(params=["pidfd", "numbers"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Neighbour]:
    if request.param == "numbers":  # an older system
        monkeypatch.delattr(os, "pidfd_open")
    return Neighbour


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_stopped_and_goes_on(process: subprocess.Popen[bytes], make: type[Neighbour]) -> None:
    neighbour = make(process.pid, start_of(process.pid))
    assert not neighbour.is_stopped
    process.send_signal(signal.SIGSTOP)
    until(lambda: neighbour.is_stopped)
    assert not neighbour.has_ended
    process.send_signal(signal.SIGCONT)
    until(lambda: not neighbour.is_stopped)


def test_it_is_killed_though_it_is_stopped(
    process: subprocess.Popen[bytes], make: type[Neighbour]
) -> None:
    neighbour = make(process.pid, start_of(process.pid))
    process.send_signal(signal.SIGSTOP)
    neighbour.kill()
    until(lambda: neighbour.has_ended)  # nobody has asked for its exit code
    assert neighbour.how_it_ended() == "was killed by SIGKILL"


def test_an_exit_code_is_told() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"])
    neighbour = Neighbour(process.pid, start_of(process.pid))
    until(lambda: neighbour.has_ended)
    assert neighbour.how_it_ended() == "ended with exit code 3"
    process.wait()
    assert neighbour.has_ended


def test_another_process_with_its_number_is_not_it(
    process: subprocess.Popen[bytes], make: type[Neighbour]
) -> None:
    started = start_of(process.pid)
    assert started is not None
    assert make(process.pid, started - 1).has_ended
    assert not make(process.pid, started).has_ended


def test_one_that_is_gone_has_ended(make: type[Neighbour]) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert make(process.pid, 1).has_ended
    assert make(process.pid, 1).how_it_ended() == "ended"
