from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.conftest import float64, forks
from tests.integration.scripts import processes_in

__all__ = ["float64", "forks", "nothing_is_left"]
SHARED = Path("/dev/shm")  # noqa: S108 - looked at only


def shared_files() -> set[Path]:
    return set(SHARED.iterdir()) if SHARED.exists() else set()


def unused(files: set[Path]) -> set[Path]:
    """Those that no living process has mapped; asked when a test's own have ended."""
    mapped = set()  # by inode: semaphores are mapped under another name than they have later
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended meanwhile
            lines = maps.read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if f"{SHARED}/" in line}
    found = set()
    for file in files:
        with suppress(FileNotFoundError):
            found |= {file} if file.stat().st_ino not in mapped else set()
    return found


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
        if not processes and not unused(files):
            return
        assert time.monotonic() < deadline, f"left: {files or 'no files'}, {processes}"
        time.sleep(0.2)
