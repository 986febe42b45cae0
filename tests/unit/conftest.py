from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_tspipe.ir.pipeline import Pipeline
from tests.unit import pipelines


@pytest.fixture(scope="session")
def make_pipeline() -> Callable[..., Pipeline]:
    """The function of that name, for tests that build pipelines of their own."""
    return pipelines.make_pipeline
