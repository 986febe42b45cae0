"""When a rank fails: its cause is told once, and every process ends.

The first rank that fails for a reason of its own tells it; ranks that fail because of that, or of
the same reason, end with one line.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_tspipe.errors import TransportError

_KEY = "lightning_tspipe/failures"
_SIGNS = ("gloo", "closed by peer", "reset by peer")
_PATIENCE = 5.0


def is_consequence(exception: BaseException) -> bool:
    """Whether a failure only tells that another rank failed."""
    text = str(exception)
    return isinstance(exception, TransportError) or (
        isinstance(exception, RuntimeError) and any(sign in text for sign in _SIGNS)
    )


def settle(exception: BaseException, rank: int, children: Sequence[Any] = ()) -> None:
    """See to it that only one rank of the job prints a traceback, and that all of them end.

    Args:
        exception: Why this rank ends.
        rank: This rank.
        children: Processes that this one started; they end with it.
    """
    if children:
        atexit.register(_end, list(children))
    if is_consequence(exception) or not _is_first():
        _be_brief(exception, rank)


def _is_first() -> bool:
    """Whether no other rank has failed before, for a reason of its own."""
    if not dist.is_initialized():
        return True
    try:
        return _get_default_store().add(_KEY, 1) == 1
    except RuntimeError:  # the store lives in a process that has failed already
        return False


def _be_brief(exception: BaseException, rank: int) -> None:
    """Print one line instead of a traceback, if the exception ends this process."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is not exception:
            previous(kind, value, traceback)
            return
        text = (str(exception).splitlines() or [""])[0]
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
