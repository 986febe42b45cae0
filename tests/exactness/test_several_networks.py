"""Any number of networks, and any way through them, train what the sequential reference trains."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.choosing import some_of
from tests.exactness.compare import assert_learned, assert_same
from tests.exactness.modules import Trained
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting
from tests.exactness.several import FED, SEVERAL, FedByState, WholeTensors, WritesBuffers

WHOLE = {"WritesBuffers": WritesBuffers, "WholeTensors": WholeTensors}


@dataclass(frozen=True)
class Several(Setting):
    """A training of a module of ``several``."""

    def build(self) -> Trained:
        torch.manual_seed(0)
        return {**SEVERAL, "FedByState": FedByState, **WHOLE}[self.case]()


# The reference delays forwards of a teacher, and not other methods.
DELAYED = [(case, "tspipe") for case in SEVERAL if case != "Entries"]


@pytest.mark.parametrize(
    ("case", "schedule"),
    some_of(
        [*DELAYED, *((case, "gpipe") for case in SEVERAL)],
        slow=[(case, "gpipe") for case in [*SEVERAL][1::2]],
        always=[*DELAYED, ("Entries", "gpipe")],
    ),
)
def test_several_networks(case: str, schedule: str) -> None:
    setting = Several(case, "adamw", schedule=schedule)
    expected = run_reference(setting)
    assert_learned(expected, setting.build())
    assert_same(expected, run_pipelined(setting))


@pytest.mark.parametrize("case", some_of(SEVERAL, slow=[*SEVERAL][::2]))
def test_folded_split_and_recomputed(case: str) -> None:
    setting = Several(case, num_stages=3, num_microbatches=3, schedule="gpipe", split=True)
    assert_same(run_reference(setting), run_pipelined(setting))
    again = Several(case, num_ranks=3, num_stages=3, schedule="gpipe", again="some")
    assert_same(run_reference(again), run_pipelined(again))


@pytest.mark.parametrize(
    "schedule",
    some_of(["tspipe", "gpipe", "sequential"], slow=["gpipe", "sequential"], always=["tspipe"]),
)
@pytest.mark.parametrize("case", FED)
def test_students_that_read_teachers(case: str, schedule: str) -> None:
    setting = Several(case, "adamw", num_ranks=3, num_stages=3, schedule=schedule, accumulate=2)
    expected = run_reference(setting)
    assert_learned(expected, setting.build())
    assert_same(expected, run_pipelined(setting))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_a_student_reads_may_depend_on_the_steps_before(num_ranks: int) -> None:
    for schedule in ("gpipe", "tspipe"):
        setting = Several("FedByState", num_ranks=num_ranks, num_stages=3, schedule=schedule)
        assert_same(run_reference(setting), run_pipelined(setting))


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_needs_whole_batches(case: str, num_ranks: int) -> None:
    setting = Several(case, "adamw", num_ranks=num_ranks, num_microbatches=1)
    expected = run_reference(setting)
    assert_learned(expected, setting.build())
    assert_same(expected, run_pipelined(setting))
