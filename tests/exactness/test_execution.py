"""Stages that run again in the backward, and compiled ones, train exactly what others train."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.exactness.compare import assert_same
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting

CASES = (
    Setting("Byol-batch-2-by hand", num_microbatches=1),
    Setting("Byol-batch-2-by hand", num_microbatches=2),
    Setting("Byol-layer-2-lightly", "adamw", num_ranks=3, num_stages=3, num_microbatches=3),
    Setting("Tap-batch-False", num_stages=3, num_microbatches=2),
    Setting("PartialCalls-batch", num_microbatches=2, schedule="gpipe"),
    Setting("TupleStudent-group", num_microbatches=2, accumulate=2),
    Setting("Distillation-batch", num_microbatches=2, schedule="sequential"),
)


def variants(**changes: str) -> list[Setting]:
    return [replace(setting, **changes) for setting in CASES]


@pytest.mark.parametrize(
    "setting", variants(again="all")[::2] + variants(again="some")[1::2], ids=str
)
def test_what_runs_again_counts_once(setting: Setting) -> None:
    assert_same(run_reference(setting), run_pipelined(setting))
