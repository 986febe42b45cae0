from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.integration import jobs


@pytest.fixture(scope="session", autouse=True)
def forks() -> None:
    jobs.preload()


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(previous)
