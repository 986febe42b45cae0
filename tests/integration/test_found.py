"""Networks without names are found by the first step, and trained as one device trains them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tspipe import TSPipeStrategy
from tests.integration.jobs import run
from tests.integration.trainings import CLOSE, Session, Training, weights_of


def fitted(training: Training) -> tuple[Any, Any, str]:
    """Losses, weights and the table of what is pipelined."""
    strategy: Any = "auto"
    if training.strategy != "auto":
        strategy = TSPipeStrategy(schedule="gpipe", num_microbatches=1, costs="flops")
    session = Session(training, strategy=strategy)
    session.fit()
    return session.recorder.losses, weights_of(session.module), getattr(strategy, "table", "")


FOUND = {
    "Moco-batch": (("backbone", "head"), ("backbone_momentum", "head_momentum")),
    "Tap-batch-False": (
        ("backbone", "head", "predictor", "classifier"), ("backbone_momentum", "head_momentum"),
    ),
    "Tap-batch-True": (("backbone", "head", "predictor"), ("backbone_momentum", "head_momentum")),
    "Mutual": (("left", "right"), ()),
    "MeanTeachers": (("left", "right"), ("late_left", "late_right")),
    "TwoHeads": (("backbone", "head", "other"), ("backbone_momentum", "head_momentum")),
    "FedByAverage": (("backbone", "head"), ("late",)),
    "FedByFrozen": (("net",), ("frozen",)),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_networks_without_names(case: str, tmp_path: Path) -> None:
    training = Training(case)
    alone = replace(training, strategy="auto", num_ranks=1)
    (expected,) = run(fitted, alone, num_ranks=1, folder=tmp_path / "alone")
    actual, *_ = run(fitted, training, num_ranks=2, folder=tmp_path / "together")
    assert len(set(map(float, expected[0]))) > 1
    for one, other in zip(expected[:2], actual[:2], strict=True):
        torch.testing.assert_close(other, one, **CLOSE)
    rows = [line.split() for line in actual[2].splitlines()[1:]]
    kinds = {row[0]: row[1] for row in rows if row[0] != "the"}
    student, teacher = FOUND[case]
    assert kinds == dict.fromkeys(student, "trained") | dict.fromkeys(teacher, "forward-only")
