from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import float64, forks
from tests.integration.scripts import processes_in

__all__ = ["float64", "forks", "nothing_is_left"]
SHARED = Path("/dev/shm")  # noqa: S108 - looked at only


def shared_files() -> set[Path]:
    return set(SHARED.iterdir()) if SHARED.exists() else set()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """A job that is over leaves no process (a loader's worker) and no shared memory."""
    before = shared_files()
    yield
    deadline = time.monotonic() + 10
    files = shared_files() - before
    while True:
        files &= shared_files()  # other tests' jobs, which run beside this one, have theirs too
        processes = processes_in(tmp_path)
        if not files and not processes:
            return
        assert time.monotonic() < deadline, f"left: {files or 'no files'}, {processes}"
        time.sleep(0.2)
