"""Which of many alike cases run always, which among the slow tests, and which only if asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(cases: Iterable[Any], *, slow: Iterable[Any], always: Iterable[Any] = ()) -> list[Any]:
    """Cases as parameters of a test; ``make exhaustive`` runs those that no other run has.

    Args:
        cases: All of them; a tuple has a value for each name.
        slow: Those that run among the slow tests.
        always: Those that run with ``make test`` too.
    """
    marks: dict[Any, tuple[pytest.MarkDecorator, ...]] = dict.fromkeys(
        cases, (pytest.mark.exhaustive,)
    )
    unknown = [case for case in (*slow, *always) if case not in marks]
    assert not unknown, f"not among the cases: {unknown}"
    marks |= dict.fromkeys(slow, (pytest.mark.slow,)) | dict.fromkeys(always, ())
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=own)
        for case, own in marks.items()
    ]
