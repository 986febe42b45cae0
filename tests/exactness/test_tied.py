"""Parameters that several stages read train what one device trains."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from tests.choosing import some_of
from tests.exactness.compare import assert_learned, assert_same
from tests.exactness.modules import Trained
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting
from tests.exactness.tied import TIED, OfTransformers

# Where a step computes with a weight while it is traced, in several threads here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@dataclass(frozen=True)
class TiedSetting(Setting):
    """A training of a module of ``tied``."""

    def build(self) -> Trained:
        torch.manual_seed(0)
        return {**TIED, "OfTransformers": OfTransformers}[self.case]()


def check(setting: Setting) -> None:
    expected = run_reference(setting)
    assert_learned(expected, setting.build())
    assert_same(expected, run_pipelined(setting), relative=1e-12)


@pytest.mark.parametrize(
    ("case", "schedule"),
    some_of(
        itertools.product(TIED, ("tspipe", "gpipe", "sequential")),
        slow=[(case, "sequential") for case in TIED],
        always=[(case, ("tspipe", "gpipe")[n % 2]) for n, case in enumerate(TIED)],
    ),
)
def test_two_ranks(case: str, schedule: str) -> None:
    check(TiedSetting(case, "adamw", schedule=schedule))


@pytest.mark.parametrize("case", some_of(TIED, slow=[*TIED][::2], always=[*TIED][1::2]))
def test_four_ranks_and_accumulation(case: str) -> None:
    check(TiedSetting(case, num_ranks=4, num_stages=4, accumulate=2, schedule="gpipe"))


@pytest.mark.parametrize("case", some_of(TIED, slow=[*TIED][1::2], always=[*TIED][::2]))
def test_both_owners_on_one_rank(case: str) -> None:
    """The first stage and the last one are on rank 1, but for what the loss reads."""
    check(TiedSetting(case, num_stages=3, num_microbatches=3, schedule="gpipe", split=True))
    check(TiedSetting(case, num_ranks=3, num_stages=3, schedule="gpipe", again="some"))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_language_model_of_transformers(num_ranks: int) -> None:
    pytest.importorskip("transformers")
    check(TiedSetting("OfTransformers", num_ranks=num_ranks, num_stages=num_ranks))
