from __future__ import annotations

import pytest
import torch

from lightning_tspipe.cli.checking import DifferenceError, Record, compare

WEIGHTS = {"a": torch.ones(2), "b": torch.ones(3)}


def record(*gradients: float) -> Record:
    steps = [{"a": torch.ones(2), "b": torch.full((3,), value)} for value in gradients]
    return Record([0.5] * len(gradients), WEIGHTS, steps)


def test_gradients_are_compared_step_by_step() -> None:
    same = compare(record(1.0, 2.0), record(1.0, 2.0))
    assert same.endswith("the same")
    assert "of gradients" in same
    with pytest.raises(DifferenceError, match="the gradients of b at update 1 differ") as caught:
        compare(record(1.0, 2.0), record(1.0, 3.0))
    assert "5.0e-01" in str(caught.value).splitlines()[2]


def test_a_gradient_that_only_one_run_has_is_a_difference() -> None:
    other = record(1.0)
    del other.gradients[0]["b"]
    with pytest.raises(DifferenceError, match="only one of the two runs has b"):
        compare(record(1.0), other)
