"""A process ends with the one that started it, also if that one was faster."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lightning_tspipe.runtime.faults.local_processes import (
    Neighbour,
    Parent,
    before_exec,
    end_with_parent,
    parent_of,
    signed_by_this_process,
    start_of,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the signal")
SECONDS = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS / 2  # before what is to be ended ends by itself
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def forked(function: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(7)
    return child


def family(
    grandchild: Callable[[Any], None], made: Callable[[], Any] = signed_by_this_process
) -> tuple[int, Neighbour]:
    """A child and its child, which runs a function that gets what its parent has made."""
    reader, writer = os.pipe()

    def parent() -> None:
        given = made()
        pid = forked(lambda: grandchild(given))
        os.write(writer, f"{pid} {start_of(pid)}".encode())
        time.sleep(SECONDS)

    child = forked(parent)
    pid, started = map(int, os.read(reader, 100).split())
    os.close(reader)
    os.close(writer)
    return child, Neighbour(pid, started)


def test_it_ends_with_its_parent() -> None:
    reader, writer = os.pipe()

    def grandchild(signature: str) -> None:
        end_with_parent(signature)
        os.write(writer, b"x")
        time.sleep(SECONDS)

    child, neighbour = family(grandchild)
    os.read(reader, 1)
    assert not neighbour.has_ended
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: neighbour.has_ended)


def test_it_ends_at_once_if_its_parent_has_ended_before() -> None:
    def grandchild(signature: str) -> None:
        parent = parent_of(signature).pid
        until(lambda: os.getppid() != parent)
        end_with_parent(signature)
        time.sleep(SECONDS)

    child, neighbour = family(grandchild)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: neighbour.has_ended)


def test_a_script_ends_at_once_if_its_parent_has_ended_before() -> None:
    """Between fork and exec, too late for the signal."""

    def grandchild(made: tuple[int, Callable[[], None]]) -> None:
        parent, end = made
        until(lambda: os.getppid() != parent)
        end()
        time.sleep(SECONDS)

    child, neighbour = family(grandchild, lambda: (os.getpid(), before_exec()))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: neighbour.has_ended)


def test_a_signature_names_this_process() -> None:
    assert parent_of(signed_by_this_process()).pid == os.getpid()
    assert not parent_of(signed_by_this_process()).has_ended


def test_only_the_main_thread_lives_long_enough() -> None:
    assert before_exec() is not None
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(before_exec).result() is None


@pytest.mark.parametrize("name", ["LIGHTNING_TSPIPE_PARENT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"])
def test_a_launcher_has_to_live(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("LIGHTNING_TSPIPE_PARENT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(other, raising=False)
    assert Parent().pid == 0  # started by hand: a shell may go
    assert not Parent().has_ended
    child = forked(lambda: time.sleep(SECONDS))
    signature = f"{child} {start_of(child)}"
    monkeypatch.setenv(name, signature if name == "LIGHTNING_TSPIPE_PARENT" else "1")
    parent = Parent()
    assert parent.pid == (child if name == "LIGHTNING_TSPIPE_PARENT" else os.getppid())
    assert not parent.has_ended
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert parent.has_ended == (name == "LIGHTNING_TSPIPE_PARENT")
