"""Notes: what the processes of a job tell each other besides their messages.

That one has failed, and why; that all are to stop; who is where. Nobody waits for a note of another
rank here, and no call waits longer than it says: a rank that is stopped, or gone, keeps none from
reading and writing.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_tspipe.errors import TransportError


class Notes(ABC):
    """Short texts under names, the same for all processes of a job."""

    @abstractmethod
    def leave(self, name: str, text: str = "") -> None:
        """Write a note, in the place of an earlier one.

        It is lost if there is no place for notes any more. May be called in a signal handler.
        """

    @abstractmethod
    def claim(self, name: str, text: str) -> bool:
        """Write a note if nobody else has.

        Returns:
            Whether this process did; also if there is no place for notes any more.
        """

    @abstractmethod
    def read(self, name: str) -> str | None:
        """A note; None if there is none.

        Raises:
            TransportError: The process that keeps the notes does not answer.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a note that nobody reads any more."""


class FolderNotes(Notes):
    """Notes of processes of one machine, as files of a folder: no process has to serve them.

    Args:
        folder: Where only this user may read and write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def leave(self, name: str, text: str = "") -> None:
        with suppress(FileNotFoundError):  # the folder goes with the last process
            self._written(text).replace(self._path(name))

    @override
    def claim(self, name: str, text: str) -> bool:
        try:
            written = self._written(text)
        except FileNotFoundError:
            return True
        try:
            # Whole or not at all, as a rename would be, but never in the place of another one.
            os.link(written, self._path(name))
        except FileExistsError:
            return False
        finally:
            written.unlink(missing_ok=True)
        return True

    @override
    def read(self, name: str) -> str | None:
        try:
            return self._path(name).read_text()
        except FileNotFoundError:
            return None

    @override
    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / name.replace("/", "-")

    def _written(self, text: str) -> Path:
        file, path = tempfile.mkstemp(dir=self.folder, prefix=".")
        with os.fdopen(file, "w") as opened:
            opened.write(text)
        return Path(path)


class StoreNotes(Notes):
    """Notes of processes of several machines, in the store that rank 0 serves, or the launcher.

    Args:
        store: A connection to it that nothing else waits at.
        seconds: How long it may take to answer.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._store = store
        self._in_time = InTime(seconds, "the store that connects the ranks")

    @override
    def leave(self, name: str, text: str = "") -> None:
        with suppress(TransportError):
            self._in_time(self._set, name, f"={text}")

    def _set(self, name: str, text: str) -> None:
        self._store.set(name, text)
        self._store.get(name)  # so that it is there before this rank goes on

    @override
    def claim(self, name: str, text: str) -> bool:
        try:
            found: bytes = self._in_time(self._store.compare_set, name, "", f"={text}")
        except TransportError:
            return True
        return found.decode() == f"={text}"

    @override
    def read(self, name: str) -> str | None:
        text: str | None = self._in_time(self._read, name)
        return text

    def _read(self, name: str) -> str | None:
        return self._store.get(name).decode()[1:] if self._store.check([name]) else None

    @override
    def remove(self, name: str) -> None:
        with suppress(TransportError):
            self._in_time(self._store.delete_key, name)


@dataclass
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    value: Any = None
    error: Exception | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.value = self.function(*self.args)
        except Exception as error:  # noqa: BLE001 - raised again, where the call came from
            self.error = error
        self.is_done.set()


class InTime:
    """Calls that may block are made by a thread of their own, and given up after a while.

    Args:
        seconds: How long a call may take; after one that took longer, all are given up at once.
        what: What is called, for messages.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._what = what
        # One that a signal handler can use while what it interrupts is using it.
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._is_lost = False
        threading.Thread(target=self._work, name="lightning-tspipe-calls", daemon=True).start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns.

        Raises:
            TransportError: It did not return in time, or failed.
        """
        call = _Call(function, args)
        if not self._is_lost:
            self._calls.put(call)
            self._is_lost = not call.is_done.wait(self._seconds)
        if self._is_lost:
            raise TransportError(f"{self._what} did not answer within {self._seconds:.0f} s")
        if call.error is not None:
            raise TransportError(f"{self._what} is gone: {call.error}") from call.error
        return call.value

    def _work(self) -> None:
        while True:
            self._calls.get().run()
