from __future__ import annotations

import pytest

from lightning_tspipe.cli import modules
from lightning_tspipe.planning.cluster import Link


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that start for each command would take most of the time."""
    monkeypatch.setattr(modules, "measure_link", lambda _: Link(2e-4, 7e9))
