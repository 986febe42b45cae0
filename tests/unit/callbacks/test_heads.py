"""When a head gets no better; the callbacks in trainings are in tests/exactness/test_fanout.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_tspipe import ConfigurationError, HeadEarlyStopping, StudentFanout


def looks(stopping: HeadEarlyStopping, values: list[float]) -> int:
    """After how many looks the head stops; 0: never."""
    module: Any = SimpleNamespace(student=StudentFanout({"a": nn.Linear(1, 1)}))
    trainer: Any = SimpleNamespace(
        callback_metrics={}, sanity_checking=False, state=SimpleNamespace(fn="fit"),
        is_global_zero=True, current_epoch=0, should_stop=False,
    )  # fmt: skip
    stopping.on_train_start(trainer, module)
    for number, value in enumerate(values, 1):
        trainer.callback_metrics["a/val_loss"] = value
        stopping.on_validation_end(trainer, module)
        if module.student.stopped:
            assert trainer.should_stop
            return number
    return 0


@pytest.mark.parametrize(
    ("mode", "patience", "values", "expected"),
    [
        ("min", 1, [3, 2, 1, 0], 0),
        ("min", 1, [3, 2, 2.5], 3),
        ("min", 1, [3, 2.95], 2),  # better by too little
        ("min", 2, [3, 4, 2, 4, 4], 5),
        ("max", 2, [3, 4, 2, 5, 4, 3], 6),
        ("max", 1, [3, 3.05], 2),
        ("min", 2, [math.nan, 3, 2, math.nan, 1], 0),
        ("min", 2, [3, math.nan, math.nan], 3),
        ("max", 1, [math.nan, math.nan], 1),
    ],
)
def test_a_head_stops_that_gets_no_better(
    mode: Any, patience: int, values: list[float], expected: int
) -> None:
    stopping = HeadEarlyStopping(mode=mode, patience=patience, min_delta=0.1)
    assert looks(stopping, values) == expected


def test_says_what_nobody_logged() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no head logged it; the logged metrics are a/val_loss\. Log"
    ):
        looks(HeadEarlyStopping("accuracy"), [1.0])
