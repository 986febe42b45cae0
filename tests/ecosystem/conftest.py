from __future__ import annotations

import pytest

from tests.integration import jobs


@pytest.fixture(scope="session", autouse=True)
def forks() -> None:
    jobs.preload()
