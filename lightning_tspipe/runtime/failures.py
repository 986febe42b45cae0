"""When a rank fails: its cause is told once, and every process ends.

The first rank that fails for a reason of its own tells it; ranks that fail because of that, or of
the same reason, end with one line. A rank that notices nothing, since it stalls or computes for
long, is ended by its own watch::

    rank 2   ... ValueError ── "failed" ──► store          traceback, exit
    rank 1   ... connection closed by rank 2               one line, exit
    rank 0   ... stalls                ◄── watch: someone has failed, 5 s ago: where it is, exit
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from lightning_tspipe.errors import TransportError

_SIGNS = ("gloo", "closed by peer", "reset by peer", "Broken pipe", "remote server shutdown")
_PATIENCE = 5.0
_PERIOD = 1.0


def is_consequence(exception: BaseException) -> bool:
    """Whether a failure only tells that another rank failed."""
    text = str(exception)
    return isinstance(exception, TransportError) or (
        isinstance(exception, RuntimeError) and any(sign in text for sign in _SIGNS)
    )


def first_line(exception: BaseException) -> str:
    """What an exception says, in short."""
    return (str(exception).strip().splitlines() or [type(exception).__name__])[0]


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what this rank waited for, if it waits in vain.

    Raises:
        TransportError: With ``what`` before the reason.
    """
    try:
        yield
    except TransportError as error:
        raise TransportError(f"{what}: {error}") from error


class Failures:
    """What the ranks of a job know of each other's failures, through the store that connects them.

    All ranks make one at the start of each run; before that, each is on its own.

    Args:
        rank: This rank.
        store: Connects the ranks; None: they are not connected yet.
        run: Number of the run; the same on all ranks, and another one in each run.
        head_start: How many seconds a rank that fails because of another one lets that one end
            first; for launchers that report the process that ended first.
    """

    def __init__(self, rank: int, store: Any = None, run: int = 0, head_start: float = 0.0) -> None:
        self._rank = rank
        self._store = store
        self._head_start = head_start
        prefix = f"lightning_tspipe/{run}/"
        self._first, self._any = prefix + "first", prefix + "any"
        self._is_over = threading.Event()
        self._is_settled = False
        self._watch: threading.Thread | None = None

    def watch(self) -> None:
        """From now on, end this process if another rank fails and this one doesn't notice."""
        self._watch = threading.Thread(
            target=self._look_around, name="lightning-tspipe-watch", daemon=True
        )
        self._watch.start()

    def end_watch(self) -> None:
        """This rank is done, or ends by itself."""
        self._is_over.set()
        if self._watch is not None:
            self._watch.join(_PERIOD)

    def settle(self, exception: BaseException, children: Sequence[Any] = ()) -> None:
        """See to it that only one rank of the job prints a traceback, and that all of them end.

        Args:
            exception: Why this rank ends.
            children: Processes that this one started; they end with it.
        """
        if self._is_settled:
            return
        self._is_settled = True
        self._is_over.set()
        end_with_this_process(children)
        is_cause = not is_consequence(exception) and self._is_first()
        with suppress(RuntimeError):  # the store lives in a process that has failed already
            if self._store is not None:
                self._store.set(self._any, "")
        if not is_cause:
            _be_brief(exception, self._rank)
            time.sleep(self._head_start)

    def _is_first(self) -> bool:
        """Whether no other rank has failed before, for a reason of its own."""
        if self._store is None:
            return True
        try:
            return bool(self._store.add(self._first, 1) == 1)
        except RuntimeError:
            return False

    def _look_around(self) -> None:
        while not self._is_over.wait(_PERIOD):
            if not self._someone_failed():
                continue
            if not self._is_over.wait(_PATIENCE):
                self._end()
            return

    def _someone_failed(self) -> bool:
        try:
            found: bool = self._store.check([self._any])
        except RuntimeError:  # gone, with rank 0
            return not self._is_over.is_set()
        return found

    def _end(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
        where = "".join(traceback.format_stack(frame)) if frame is not None else ""
        print(  # noqa: T201 - where a traceback would go
            f"rank {self._rank} is ended: another rank has failed, and this one did not notice "
            f"within {_PATIENCE:.0f} s. It was here:\n{where}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        os._exit(1)


def end_with_this_process(children: Sequence[Any]) -> None:
    """When this process ends, its children end soon after: by themselves, or they are killed."""
    scripts = [child for child in children if isinstance(child, subprocess.Popen)]
    if scripts:
        atexit.register(_end, scripts)


def _be_brief(exception: BaseException, rank: int) -> None:
    """Print one line instead of a traceback, if the exception ends this process."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is not exception:
            previous(kind, value, traceback)
            return
        text = first_line(exception)
        line = f"rank {rank} stops too: {text}"
        if not is_consequence(exception):
            line = f"rank {rank} stops too: {kind.__name__}: {text}"
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - where the traceback would go

    sys.excepthook = hook


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Give the other processes time to see for themselves, then end them."""
    deadline = time.monotonic() + _PATIENCE
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
