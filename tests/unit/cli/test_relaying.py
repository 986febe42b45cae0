"""What ``tspipe plan --schedule relay`` prints."""

from __future__ import annotations

import pytest

from lightning_tspipe.cli.relaying import explained
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.relay import BlockProfile, RelayProfile


def profile(state_bytes: int = 0) -> RelayProfile:
    def block(name: str, seconds: float) -> BlockProfile:
        teacher = {n: seconds * n for n in (2, 3, 6)}
        student = {n: 2 * t for n, t in teacher.items()}
        return BlockProfile(name, teacher, student, state_bytes=state_bytes)

    return RelayProfile((block("long", 3.0), block("short", 1.0)), 6)


def test_modes_are_compared_and_the_best_is_explained() -> None:
    text = explained(profile(), 3, None)
    assert "*  ahd" in text
    assert "dpu: 2 blocks for 3 devices" in text
    assert "devices busy 100%" in text
    # Three quarters of the work are the first block's: two devices share it, and all are busy.
    assert "its slowest stage, 0; the work of all blocks on whole batches, divided evenly" in text


def test_blocks_that_fit_nowhere() -> None:
    with pytest.raises(PartitionError, match=r"block 0 \(long\) fits no device"):
        explained(profile(state_bytes=100), 3, 10)
