from __future__ import annotations

from tests.exactness.conftest import float64

__all__ = ["float64"]
