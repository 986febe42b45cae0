"""What this process is doing, in words for people; other ranks can read it, even after its end."""

from __future__ import annotations

import mmap
from pathlib import Path

SAVING = "saving a checkpoint"
_SIZE = 256


class Phase:
    """What a rank is doing.

    A rank that is killed can't say what it did. Where the ranks share a machine, it is in a file
    that is mapped: to write there takes a microsecond, and what was written outlives the rank.

    Attributes:
        text: In a few words.
        checkpoint: The last one that was saved; "": none yet.
    """

    def __init__(self) -> None:
        self.text = "the start-up"
        self.checkpoint = ""
        self._before: str | None = None
        self._memory: mmap.mmap | None = None

    def enter(self, text: str) -> None:
        """From now on this rank does something else."""
        self.text, self._before = text, None
        if self._memory is not None:
            self._memory[:] = text.encode()[:_SIZE].ljust(_SIZE)

    def interrupt(self, text: str) -> None:
        """For a while this rank does something else."""
        before = self.text if self._before is None else self._before
        self.enter(text)
        self._before = before

    def go_on(self) -> None:
        """This rank does again what it did before the interruption."""
        if self._before is not None:
            self.enter(self._before)

    def share(self, folder: Path, rank: int) -> None:
        """Let other processes of this machine read it."""
        with _path(folder, rank).open("w+b") as file:
            file.truncate(_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self.enter(self.text)


def phase_of(folder: Path, rank: int) -> str:
    """What another rank of this machine is doing, or did before it ended; "" if unknown."""
    try:
        return _path(folder, rank).read_text(errors="replace").strip("\0 ")
    except OSError:
        return ""


def _path(folder: Path, rank: int) -> Path:
    return folder / f"phase-{rank}"


HERE = Phase()
"""Of this process."""
