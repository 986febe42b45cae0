"""Where ranks have fewer communicators than edges, the rest passes through the host, as exactly."""

from __future__ import annotations

import pytest

from lightning_tspipe.runtime.transport import channels
from tests.exactness.test_fanout_threads import (  # noqa: F401 - collected here once more
    test_some_numbers_of_ranks_heads_and_batches_ahead,
)
from tests.exactness.test_relay import (  # noqa: F401
    test_distributions,
    test_ranks_add_up_numbers_while_the_next_activations_are_asked_for,
    test_relay_between_any_widths,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, params=[2, pytest.param(3, marks=pytest.mark.exhaustive)])
def _few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_COMMUNICATORS", request.param)
