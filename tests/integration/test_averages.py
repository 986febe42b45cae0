"""An average of the student that the training step doesn't call lies where the student does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.averaged import Case, train, validate_apart
from tests.integration.jobs import run
from tests.integration.trainings import CLOSE

ONE_MICROBATCH = {"num_microbatches": 1}  # BatchNorm


@pytest.mark.parametrize(
    "case",
    [
        Case(3, ONE_MICROBATCH),
        Case(2, ONE_MICROBATCH, parts=True),
        Case(2, ONE_MICROBATCH, buffers=None, name="teacher"),
        pytest.param(Case(2, ONE_MICROBATCH, buffers="copy"), marks=pytest.mark.slow),
        pytest.param(
            Case(4, {**ONE_MICROBATCH, "teacher": "average"}, "keep"), marks=pytest.mark.slow
        ),
        pytest.param(
            Case(2, {**ONE_MICROBATCH, "schedule": "gpipe"}, builds_late=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["by a callback", "by several", "in the step", "statistics", "declared", "built late"],
)
def test_an_average_that_no_step_calls_is_that_of_one_device(case: Case, tmp_path: Path) -> None:
    alone = replace(case, num_ranks=1, builds_late=False)
    expected = run(train, alone, num_ranks=1, folder=tmp_path)[0]
    ranks = run(train, case, num_ranks=case.num_ranks, folder=tmp_path)
    # A module that is built late stays spread; of others the first rank has all of it.
    weights = {name: value for rank in reversed(ranks) for name, value in rank.weights.items()}
    torch.testing.assert_close(weights, expected.weights, **CLOSE)
    assert ranks[0].metrics == pytest.approx(expected.metrics, rel=1e-9)
    assert len(ranks[0].metrics) == 4


def test_one_loader_for_the_average_and_one_for_the_student(tmp_path: Path) -> None:
    """The stages are made for the first; the second step, which calls another network, is whole."""
    expected = run(validate_apart, Case(), num_ranks=1, folder=tmp_path)[0]
    ranks = run(validate_apart, Case(2, ONE_MICROBATCH), num_ranks=2, folder=tmp_path)
    assert ranks[0] == pytest.approx(expected, rel=1e-9)
    assert len(expected) == 2
