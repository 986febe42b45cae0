"""The user's line, for messages and recordings."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from lightning_tspipe.errors import CaptureError, TSPipeError
from lightning_tspipe.networks.modules import LIBRARIES

_PACKAGE = str(Path(__file__).resolve().parent.parent)


def is_own(filename: str) -> bool:
    """Whether code is this package's."""
    return filename.startswith(_PACKAGE)


@cache
def _is_user_code(filename: str) -> bool:
    if is_own(filename) or filename.startswith("<") or "importlib" in filename:
        return False
    parts = Path(filename).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] not in LIBRARIES
    return not filename.startswith(sys.base_prefix)


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first line of user code in some frames, the innermost of which comes first."""
    for frame, number in frames:
        filename = frame.f_code.co_filename
        if _is_user_code(filename):
            return f"{filename}:{number} ({linecache.getline(filename, number).strip()})"
    return "unknown line"


def current_line() -> str:
    """The innermost line of user code on the stack: ``file:line (text)``."""
    return _innermost(traceback.walk_stack(sys._getframe()))  # noqa: SLF001 - as traceback does


def line_of(error: BaseException) -> str:
    """The innermost line of user code that an error came through."""
    return _innermost(reversed(list(traceback.walk_tb(error.__traceback__))))


def line_of_function(function: Any) -> str:
    """The line where a function of the user's begins, whatever wraps it."""
    while not hasattr(inspect.unwrap(function), "__code__"):
        function = function.func  # a partial one
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"


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
        told = str(error).partition("\n\n")[0]  # what follows is for who develops torch
        if isinstance(error, GuardOnDataDependentSymNode):
            told = "it decides by the value of a tensor; torch.where chooses without a decision"
        raise CaptureError(f"{what} at {line_of(error)}: {told}. {remedy}") from error
