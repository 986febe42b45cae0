from __future__ import annotations

from tests.integration.conftest import float64, forks

__all__ = ["float64", "forks"]
