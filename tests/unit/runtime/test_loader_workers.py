"""Workers of loaders that end before their loader lets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.faults import loader_workers
from lightning_tspipe.runtime.faults.loader_workers import (
    hear_of_children,
    iterate,
    let_children_end,
)
from lightning_tspipe.runtime.faults.private_folder import shared_temporary_folder


@pytest.fixture
def iterator() -> Iterator[Any]:
    """Of a loader with a worker that waits."""
    shared_temporary_folder()  # a worker that is killed would leave one of its own
    made: Any = iter(DataLoader(range(9), num_workers=1))  # type: ignore[arg-type]
    next(made)
    yield made
    hear_of_children()
    heard = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert heard != signal.SIG_DFL
    made._shutdown_workers()
    signal.signal(signal.SIGCHLD, heard)


def kill(iterator: Any) -> None:
    """As torchrun does, to all processes of a rank's group."""
    (worker,) = iterator._workers
    # By another process: its parent's signal is a worker's usual end.
    subprocess.run(["kill", str(worker.pid)], check=True)  # noqa: S603, S607
    end = time.monotonic() + 10
    # Left for whoever hears of it: what has been asked for is forgotten.
    left = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, worker.pid, left) is None and time.monotonic() < end:
        time.sleep(0.01)


def test_the_end_of_a_worker_is_a_failure_until_this_process_ends_too(iterator: Any) -> None:
    let_children_end()
    let_children_end()  # twice: the first one counts
    kill(iterator)


def test_it_is_one_again_when_this_process_begins_anew(iterator: Any) -> None:
    let_children_end()
    hear_of_children()
    with pytest.raises(RuntimeError, match="is killed by signal: Terminated"):
        kill(iterator)


def of_one_worker(**options: Any) -> DataLoader[Any]:
    return DataLoader(range(9), num_workers=1, batch_size=None, **options)  # type: ignore[arg-type]


def signal_from_elsewhere(pid: int) -> None:
    subprocess.run(["kill", str(pid)], check=True)  # noqa: S603, S607


def noting(_: int) -> None:
    """Runs in the worker, where a signal is waited for by then."""
    assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize(
    ("context", "begin"),
    [
        ("fork", noting),
        pytest.param("spawn", None, marks=pytest.mark.slow),
    ],
)
def test_a_worker_outlives_a_signal_that_is_not_its_ranks(context: str, begin: Any) -> None:
    loader = of_one_worker(multiprocessing_context=context, worker_init_fn=begin)
    batches: Any = iterate(loader)
    assert loader.worker_init_fn is begin
    assert next(batches) == 0
    (worker,) = batches._workers
    signal_from_elsewhere(worker.pid)
    time.sleep(0.2)
    assert list(batches) == list(range(1, 9))
    worker.join(10)
    assert worker.exitcode == 0
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize(("grace", "signals", "code"), [(0.1, 1, -15), (30.0, 2, -15), (30, 0, 0)])
def test_it_ends_after_a_while_or_when_told_again_or_by_its_rank(
    grace: float, signals: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_workers, "GRACE", grace)
    let_children_end()
    batches: Any = iterate(of_one_worker(multiprocessing_context="fork", prefetch_factor=2))
    next(batches)
    let_children_end()  # the first loader of a process sets a handler
    (worker,) = batches._workers
    for _ in range(signals):
        signal_from_elsewhere(worker.pid)
        time.sleep(0.1)
    if not signals:
        worker.terminate()
    worker.join(10)
    assert worker.exitcode == code
    hear_of_children()


OF_A_RANK = """
import torch
from torch.utils.data import DataLoader
from lightning_tspipe.runtime.faults.loader_workers import iterate

loader = DataLoader(torch.arange(9.0), num_workers=1, multiprocessing_context="{context}")
if __name__ == "__main__":
    batches = iterate(loader)
    next(batches)
    raise SystemExit(3)
"""


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_the_sockets_of_a_worker_that_its_rank_ends_go_with_the_rank(
    context: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(OF_A_RANK.format(context=context))
    with TemporaryDirectory() as temporary:  # a short path: a socket's has 107 characters at most
        ended = subprocess.run(  # noqa: S603 - of this test
            [sys.executable, str(script)], env=os.environ | {"TMPDIR": temporary}, check=False
        )
        assert ended.returncode == 3
        left = {path.name for path in Path(temporary).rglob("*")}
        assert left == {f"lightning-tspipe-{os.getuid()}", ".lock"}


def test_a_temporary_folder_that_is_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("f" * 90)
    folder.mkdir()
    monkeypatch.setitem(process.current_process()._config, "tempdir", str(folder))  # type: ignore[attr-defined]
    loader: Any = DataLoader(range(3), batch_size=None, num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"limit is \d+ char.*Set TMPDIR to a shorter"):
        iterate(loader)


@pytest.mark.parametrize(
    ("error", "is_parent", "is_told"),
    [
        (ConnectionResetError(), False, False),
        (EOFError(), False, False),
        (ConnectionResetError(), True, True),
        (ValueError(), False, True),
    ],
)
def test_a_rank_that_was_killed_is_no_error_of_its_workers(
    error: Exception, is_parent: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_workers, "_SECONDS", 0.1)
    told: list[Any] = []
    rank = os.getppid() if is_parent else -1
    loader_workers._tell(lambda *args: told.append(args), rank, type(error), error, None)
    assert told == ([(type(error), error, None)] if is_told else [])


def test_without_workers_it_is_a_plain_iterator() -> None:
    assert list(iterate([1, 2])) == [1, 2]
    assert list(iterate(DataLoader(range(3), batch_size=None))) == [0, 1, 2]  # type: ignore[arg-type]
