"""Workers of loaders that end before their loader lets them."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_tspipe.runtime.faults.loader_workers import hear_of_children, let_children_end


@pytest.fixture
def iterator() -> Iterator[Any]:
    """Of a loader with a worker that waits."""
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
    while worker.is_alive() and time.monotonic() < end:
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
