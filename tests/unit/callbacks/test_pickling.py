"""Callbacks travel to ranks that are spawned, as Lightning's do."""

from __future__ import annotations

import pickle

import pytest

from lightning_tspipe import (
    AutoCache,
    BlockwiseRelay,
    DelayedTeacherUpdate,
    FreezeAndRepack,
    MomentumEMA,
    PipelineThroughputMonitor,
    PipelineTimeline,
    ScheduledFreeze,
    WeightPrediction,
)
from lightning_tspipe.callbacks.common import Callback

CALLBACKS = [
    AutoCache(), BlockwiseRelay(), DelayedTeacherUpdate(), FreezeAndRepack(ScheduledFreeze({1: 2})),
    FreezeAndRepack(ScheduledFreeze({1: 2}), cache=AutoCache(memory="8MB")), MomentumEMA(),
    PipelineThroughputMonitor(), PipelineTimeline(), WeightPrediction(),
]  # fmt: skip


@pytest.mark.parametrize("callback", CALLBACKS, ids=[str(n) for n in range(len(CALLBACKS))])
def test_a_callback_can_be_pickled(callback: Callback) -> None:
    again = pickle.loads(pickle.dumps(callback))  # noqa: S301 - our own bytes
    assert type(again) is type(callback)
