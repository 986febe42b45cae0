from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import float64, forks
from tests.leftovers import none_left

__all__ = ["float64", "forks", "nothing_is_left"]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """A job that is over leaves no process (a loader's worker) and no shared memory."""
    with none_left(tmp_path):
        yield
