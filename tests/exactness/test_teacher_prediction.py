"""A predicted teacher equals its sequential reference, and is nearer to the one that was meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_tspipe.runtime.weights.prediction import TeacherPrediction
from tests.exactness.compare import assert_same
from tests.exactness.pipelined import run_pipelined
from tests.exactness.reference import run_reference
from tests.exactness.setting import Setting

ONE_EPOCH = ((4, 4, 4, 4, 4),)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("case", ["Byol-group-2-by hand", "HookEma-batch-2"])
def test_a_predicted_teacher_equals_the_reference(case: str, num_ranks: int) -> None:
    setting = Setting(
        case, "sgd", ONE_EPOCH, num_ranks=num_ranks, num_stages=num_ranks, predict=True
    )
    expected = run_reference(setting)
    assert_same(expected, run_pipelined(setting))
    late = run_reference(Setting(case, "sgd", ONE_EPOCH))
    assert not torch.equal(late.losses[-1], expected.losses[-1])


def test_the_distance_to_the_teacher_that_was_meant_is_counted() -> None:
    """A straight way is predicted to the end; after a bend, half of the way too far."""
    layer = nn.Linear(1, 1, bias=False).requires_grad_(requires_grad=False)
    prediction = TeacherPrediction({"teacher": layer})
    read = []
    for step, place in enumerate((0.0, 1.0, 2.0, 2.0)):
        layer.weight.fill_(place)
        with prediction.reading(step):
            read.append(float(layer.weight))
        assert float(layer.weight) == place
    assert read == [0.0, 2.0, 3.0, 2.0]
    found = [(d.step, *d.squares.tolist()) for d in prediction.distances]
    assert found == [(1, 1.0, 1.0), (2, 1.0, 0.0), (3, 0.0, 1.0)]
