"""What a job leaves behind: processes, and files in shared memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integration.scripts import processes_in

SHARED = Path("/dev/shm")  # noqa: S108 - looked at only


def _shared_files() -> set[Path]:
    return set(SHARED.iterdir()) if SHARED.exists() else set()


def _unused(files: set[Path]) -> set[Path]:
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


@contextmanager
def none_left(folder: Path) -> Iterator[None]:
    """Check that a job that ends inside, and works in a folder, leaves no process and no memory.

    Other tests' jobs, which run beside this one, have processes and memory too.

    Args:
        folder: Where its processes work.

    Raises:
        AssertionError: Something is still there 10 s later.
    """
    before = _shared_files()
    yield
    deadline = time.monotonic() + 10
    files = _shared_files() - before
    while True:
        files &= _shared_files()
        processes = processes_in(folder)
        if not processes and not _unused(files):
            return
        assert time.monotonic() < deadline, f"left: {files or 'no files'}, {processes}"
        time.sleep(0.2)
