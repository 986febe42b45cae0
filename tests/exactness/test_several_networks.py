"""Any number of networks, and any way through them, train what the sequential reference trains."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.exactness.compare import assert_learned, assert_same
from tests.exactness.modules import Trained
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting
from tests.exactness.several import SEVERAL


@dataclass(frozen=True)
class Several(Setting):
    """A training of a module of ``several``."""

    def build(self) -> Trained:
        torch.manual_seed(0)
        return SEVERAL[self.case]()


@pytest.mark.parametrize("schedule", ["tspipe", "gpipe"])
@pytest.mark.parametrize("case", SEVERAL)
def test_several_networks(case: str, schedule: str) -> None:
    if case == "Entries" and schedule == "tspipe":
        pytest.skip("the reference delays forwards, not methods")
    setting = Several(case, "adamw", schedule=schedule)
    expected = run_reference(setting)
    assert_learned(expected, setting.build())
    assert_same(expected, run_pipelined(setting))


@pytest.mark.parametrize("case", SEVERAL)
def test_folded_split_and_recomputed(case: str) -> None:
    setting = Several(case, num_stages=3, num_microbatches=3, schedule="gpipe", split=True)
    assert_same(run_reference(setting), run_pipelined(setting))
    again = Several(case, num_ranks=3, num_stages=3, schedule="gpipe", again="some")
    assert_same(run_reference(again), run_pipelined(again))
