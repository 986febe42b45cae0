"""The user's line, for messages."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_LIBRARIES = ("torch", "lightning", "pytorch_lightning")


def _is_user_code(filename: str) -> bool:
    if filename.startswith((_PACKAGE, "<")) or "importlib" in filename:
        return False
    parts = Path(filename).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] not in _LIBRARIES
    return not filename.startswith(sys.base_prefix)


def _format(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        if _is_user_code(frame.filename):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "unknown line"


def current_line() -> str:
    """The innermost line of user code on the stack: ``file:line (text)``."""
    return _format(traceback.extract_stack())


def line_of(error: BaseException) -> str:
    """The innermost line of user code in a traceback."""
    tb: TracebackType | None = error.__traceback__
    return _format(traceback.extract_tb(tb))
