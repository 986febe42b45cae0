"""``benchmarks/soak``: what counts as growth."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak.main import LIMITS, does_grow, growth, held, line


def rows(**changes: float) -> list[dict[str, float]]:
    """Of 5,000 batches: things that stay, but for the first 500 and for some that change."""
    return [
        {
            "batch": batch,
            **{
                what: 40 + (batch < 500) * batch / 10 + changes.get(what, 0) * batch
                for what in LIMITS
            },
        }
        for batch in range(100, 5001, 100)
    ]  # fmt: skip


def row(**changes: float) -> dict[str, Any]:
    found = rows(**changes)
    return {
        "mode": "m", "rank": 0, "ms_per_batch": 1.0, "growth": growth(found), "last": found[-1]
    }  # fmt: skip


def test_what_stays_behind_the_warm_up_is_flat() -> None:
    flat = row()
    assert not does_grow(flat)
    assert flat["growth"] == pytest.approx(dict.fromkeys(LIMITS, 0), abs=1e-9)
    assert "*" not in line(flat)


@pytest.mark.parametrize(
    ("what", "per_batch"), [("own", 0.001), ("shared", 0.0005), ("files", 0.001), ("maps", 0.01)]
)
def test_a_little_for_each_batch_is_seen(what: str, per_batch: float) -> None:
    grown = row(**{what: per_batch})
    assert grown["growth"][what] == pytest.approx(4500 * per_batch)
    assert does_grow(grown)
    assert line(grown).count("*") == 1


def test_what_a_process_holds() -> None:
    found = held()
    assert found.keys() == LIMITS.keys()
    assert found["own"] > 10
    assert found["files"] >= 3
    assert found["threads"] >= 1
