"""Pipelined training equals the sequential reference, for every way of writing a step."""

from __future__ import annotations

import pytest

from tests.exactness.compare import assert_learned, assert_same
from tests.exactness.modules import CASES, RANDOM_CASE
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting


@pytest.mark.parametrize("case", CASES)
def test_a_pipelined_training_equals_the_reference(case: str) -> None:
    setting = Setting(case, "adamw", num_ranks=3, num_stages=3, num_microbatches=2)
    expected = run_reference(setting)
    assert_learned(expected, setting.build())
    assert_same(expected, run_pipelined(setting))


@pytest.mark.parametrize(
    "case", ["Byol-batch-2-by hand", "Moco-batch", "Tap-batch-True", RANDOM_CASE]
)
def test_one_device_and_one_micro_batch_is_bit_equal(case: str) -> None:
    setting = Setting(case, num_ranks=1, num_stages=1, num_microbatches=1)
    assert_same(run_reference(setting), run_pipelined(setting), exact=True)
