"""The user's line, for messages."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_tspipe.errors import CaptureError, TSPipeError

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_LIBRARIES = ("torch", "lightning", "pytorch_lightning")


def is_own(filename: str) -> bool:
    """Whether code is this package's."""
    return filename.startswith(_PACKAGE)


def _is_user_code(filename: str) -> bool:
    if is_own(filename) or filename.startswith("<") or "importlib" in filename:
        return False
    parts = Path(filename).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] not in _LIBRARIES
    return not filename.startswith(sys.base_prefix)


def _innermost(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        if _is_user_code(frame.filename):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "unknown line"


def current_line() -> str:
    """The innermost line of user code on the stack: ``file:line (text)``."""
    return _innermost(traceback.extract_stack())


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """While inside, errors of the user's code are told with their line, what failed and a remedy.

    Raises:
        CaptureError: Instead of them.
    """
    try:
        yield
    except TSPipeError:
        raise
    except Exception as error:
        line = _innermost(traceback.extract_tb(error.__traceback__))
        raise CaptureError(f"{what} at {line}: {error}. {remedy}") from error
