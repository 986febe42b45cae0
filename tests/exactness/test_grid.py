"""Pipelined training equals the sequential reference, over a drawn grid (see ``grid``)."""

from __future__ import annotations

import pytest

from lightning_tspipe.schedules.registry import FIXED
from tests.exactness.compare import assert_same
from tests.exactness.grid import sample
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting

SMALL, LARGE = sample(0, 44), sample(1_000, 600)
NUM_QUICK = 22
"""Of the small sample; the others are slow."""
NUM_SLOW = 24
"""Of the large sample; the others take long, and ``make exhaustive`` runs them."""


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, marks=() if n < NUM_QUICK else pytest.mark.slow)
        for n, setting in enumerate(SMALL)
    ],
    ids=str,
)
def test_drawn_training_equals_the_reference(setting: Setting) -> None:
    assert_same(run_reference(setting), run_pipelined(setting))


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_schedule_equals_the_reference(name: str) -> None:
    setting = Setting("Distillation-batch", num_stages=3, num_microbatches=2, schedule=name)
    assert_same(run_reference(setting), run_pipelined(setting))


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, marks=pytest.mark.slow if n < NUM_SLOW else pytest.mark.exhaustive)
        for n, setting in enumerate(LARGE)
    ],
    ids=str,
)
def test_drawn_training_equals_the_reference_in_many_more_cases(setting: Setting) -> None:
    assert_same(run_reference(setting), run_pipelined(setting))


def test_the_small_sample_covers_every_dimension() -> None:
    stages = range(1, 5)
    assert {(s.num_stages, s.num_microbatches) for s in SMALL} == {
        (a, b) for a in stages for b in stages
    }
    assert {(s.schedule, s.split) for s in SMALL} == {
        (name, split) for name in ("tspipe", "gpipe", "sequential") for split in (False, True)
    }
    assert {s.optimizer for s in SMALL} == {"sgd", "adamw", "lars"}
    assert {s.accumulate for s in SMALL} == {1, 2}
    assert any(s.num_ranks < s.num_stages for s in SMALL)
    assert any(min(map(min, s.sizes)) < s.num_microbatches for s in SMALL)
