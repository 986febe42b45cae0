"""Heads on a trunk over several ranks, against each head trained alone."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exactness.fanout import make_batches, train_alone
from tests.integration.fanned import Fanned, Outcome, files, train
from tests.integration.jobs import run

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def check(found: list[Outcome], job: Fanned, **alone: Any) -> None:
    """Every head is as if it had been trained alone, and every rank knows its metrics."""
    batches = make_batches(job.sizes)
    for index in range(job.num_heads):
        name = f"task{index}"
        weights, losses = train_alone(index, batches=batches, **alone)
        torch.testing.assert_close(found[0].weights[name], weights, **CLOSE)
        for rank in found:
            assert rank.metrics[f"{name}/loss_step"] == pytest.approx(losses[-1], rel=1e-9)


def test_each_head_over_two_ranks_is_as_if_it_were_alone(tmp_path: Path) -> None:
    job = Fanned(trainer={"num_sanity_val_steps": 1}, options={"partition": [4, 6]})
    found: list[Outcome] = run(train, job, 2, num_ranks=2, folder=tmp_path)
    check(found, job)
    assert sorted(name for rank in found for name in rank.heads) == ["task0", "task1", "task2"]
    assert found[0].depth == 2
    for rank in found:
        assert {f"task{i}/val_loss" for i in range(3)} <= rank.metrics.keys()
    # Rank 0's logger has every step of every head.
    (log,) = tmp_path.rglob("metrics.csv")
    with log.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for index in range(3):
        _, losses = train_alone(index)
        logged = [(int(r["step"]), float(v)) for r in rows if (v := r[f"task{index}/loss_step"])]
        assert [value for _, value in sorted(logged)] == pytest.approx(losses)
    assert set(files(tmp_path)) == {"task0", "task1", "task2"}
