"""Notes: what the processes of a job tell each other besides their messages.

That one has failed, and why; that all are to stop; who is where. Nobody waits for a note of another
rank here, and no call waits longer than it says: a rank that is stopped, or gone, keeps none from
reading and writing.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_tspipe.errors import TransportError


class Notes:
    """Short texts under names, the same for all processes of a job.

    Those of this class are a process's that has met no other one: nobody reads them.
    """

    def leave(self, name: str, text: str = "") -> None:
        """Write a note, in the place of an earlier one.

        It is lost if there is no place for notes any more. May be called in a signal handler.
        """

    def claim(self, name: str, text: str) -> bool:  # noqa: ARG002 - nobody reads it
        """Write a note if nobody else has.

        Returns:
            Whether this process did; also if there is no place for notes any more.
        """
        return True

    def read(self, name: str) -> str | None:  # noqa: ARG002 - there is none
        """A note; None if there is none.

        Raises:
            TransportError: The process that keeps the notes does not answer.
        """
        return None


@dataclass
class FolderNotes(Notes):
    """Notes of processes of one machine, as files of a folder: no process has to serve them.

    Attributes:
        folder: Where only this user may read and write.
    """

    folder: Path

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

    def _path(self, name: str) -> Path:
        return self.folder / name.replace("/", "-")

    def _written(self, text: str) -> Path:
        file, path = tempfile.mkstemp(dir=self.folder, prefix=".")
        with os.fdopen(file, "w") as opened:
            opened.write(text)
        return Path(path)


@dataclass
class StoreNotes(Notes):
    """Notes of processes of several machines, in the store that rank 0 serves, or the launcher.

    Calls to it may block: each has a thread of its own, and is given up after a while.

    Attributes:
        store: A connection to it that nothing else waits at.
        seconds: How long it may take to answer; after a call that took longer, all are given up.
    """

    store: Any
    seconds: float
    _is_lost: bool = False

    def _in_time(self, function: Callable[..., Any], *args: Any) -> Any:
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args))
            except Exception as error:  # noqa: BLE001 - raised again, where the call came from
                future.set_exception(error)

        if not self._is_lost:
            threading.Thread(target=call, name="lightning-tspipe-call", daemon=True).start()
        try:
            return future.result(0 if self._is_lost else self.seconds)
        except TimeoutError:
            self._is_lost = True
            raise TransportError(
                f"the store that connects the ranks did not answer within {self.seconds:.0f} s"
            ) from None
        except Exception as error:
            raise TransportError(f"the store that connects the ranks is gone: {error}") from error

    @override
    def leave(self, name: str, text: str = "") -> None:
        with suppress(TransportError):
            self._in_time(self.store.set, name, f"={text}")
            self._in_time(self.store.get, name)  # so that it is there before this rank goes on

    @override
    def claim(self, name: str, text: str) -> bool:
        try:
            found: bytes = self._in_time(self.store.compare_set, name, "", f"={text}")
        except TransportError:
            return True
        return found.decode() == f"={text}"

    @override
    def read(self, name: str) -> str | None:
        if not self._in_time(self.store.check, [name]):
            return None
        text: str = self._in_time(self.store.get, name).decode()
        return text[1:]
