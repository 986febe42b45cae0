from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration import jobs
from tests.integration.scripts import processes_in

SHARED = Path("/dev/shm")  # noqa: S108 - looked at only


def shared_files() -> set[Path]:
    return set(SHARED.iterdir()) if SHARED.exists() else set()


@pytest.fixture(scope="session", autouse=True)
def forks() -> None:
    jobs.preload()


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(previous)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """A job that is over leaves no process (a loader's worker) and no shared memory."""
    before = shared_files()
    yield
    deadline = time.monotonic() + 10
    while True:
        files = shared_files() - before
        processes = processes_in(tmp_path)
        if not files and not processes:
            return
        assert time.monotonic() < deadline, f"left: {files or 'no files'}, {processes}"
        time.sleep(0.2)
