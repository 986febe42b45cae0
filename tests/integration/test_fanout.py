"""Heads on a trunk over several ranks, against each head trained alone."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from tests.exactness.fanout import make_batches, train_alone
from tests.integration.fanned import Fanned, Outcome, break_it, files, train
from tests.integration.jobs import run, run_job
from tests.integration.trainings import CLOSE


def check(found: list[Outcome], job: Fanned, **alone: Any) -> None:
    """Every head is as if it had been trained alone, and every rank knows its metrics."""
    batches = make_batches(job.sizes)
    for index in range(job.num_heads):
        name = f"task{index}"
        weights, losses = train_alone(index, batches=batches, **alone)
        torch.testing.assert_close(found[0].weights[name], weights, **CLOSE)
        for rank in found:
            assert rank.metrics[f"{name}/loss_step"] == pytest.approx(losses[-1], rel=1e-9)
            last = mean(losses[-len(batches) :])  # of its own object, in the last epoch
            assert rank.metrics[f"{name}/mean"] == pytest.approx(last, rel=1e-5)


def test_each_head_over_two_ranks_is_as_if_it_were_alone(tmp_path: Path) -> None:
    # Validated within an epoch too, while batches and their labels are under way.
    often = {"num_sanity_val_steps": 1, "val_check_interval": 2}
    job = Fanned(trainer=often, options={"partition": [4, 6]})
    found: list[Outcome] = run(train, job, 2, num_ranks=2, folder=tmp_path)
    check(found, job)
    assert sorted(name for rank in found for name in rank.heads) == ["task0", "task1", "task2"]
    assert found[0].depth == 2
    for rank in found:
        assert {f"task{i}/val_loss" for i in range(3)} <= rank.metrics.keys()
    # Rank 0's logger has every step of every head, and not only when an epoch ends.
    assert {f"task{i}/loss_step" for i in range(3)} <= found[0].logged_early
    (log,) = tmp_path.rglob("metrics.csv")
    with log.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for index in range(3):
        _, losses = train_alone(index)
        logged = [(int(r["step"]), float(v)) for r in rows if (v := r[f"task{index}/loss_step"])]
        assert [value for _, value in sorted(logged)] == pytest.approx(losses)
    assert set(files(tmp_path)) == {"task0", "task1", "task2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_heads", "depth", "partition"),
    [(2, 1, 1, [5, 5]), (3, 6, 3, [3, 3, 4]), (3, 2, 2, [4, 3, 3]), (4, 6, 6, [2, 3, 3, 2])],
)
def test_any_number_of_heads_on_any_number_of_ranks(
    tmp_path: Path, num_ranks: int, num_heads: int, depth: int, partition: list[int]
) -> None:
    job = Fanned(
        num_heads,
        {"queue_depth": depth, "partition": partition},
        sizes=(5, 5, 4, 5, 5, 3),
        trainer={"gradient_clip_val": 0.3},
        validates=False,
    )
    found = run(train, job, num_ranks, num_ranks=num_ranks, folder=tmp_path)
    check(found, job, clip=0.3)
    assert len([name for rank in found for name in rank.heads]) == num_heads


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["tspipe", "gpipe", "sequential"])
def test_one_rank_and_no_queue(tmp_path: Path, schedule: str) -> None:
    job = Fanned(4, {"schedule": schedule}, validates=False)
    check(run(train, job, 1, num_ranks=1, folder=tmp_path / "one"), job)
    job = Fanned(4, {"schedule": schedule, "queue_depth": 0}, validates=False)
    check(run(train, job, 2, num_ranks=2, folder=tmp_path / "two"), job)


@pytest.mark.slow
def test_heads_that_stop_leave_the_others_as_they_are(tmp_path: Path) -> None:
    job = Fanned(3, diverges="task1", validates=False, trainer={"accumulate_grad_batches": 1})
    found = run(train, job, 2, num_ranks=2, folder=tmp_path / "nan")
    for rank in found:
        assert rank.stopped == {"task1": "its loss is inf"}
    for index in (0, 2):
        weights, _ = train_alone(index)
        torch.testing.assert_close(found[0].weights[f"task{index}"], weights, **CLOSE)
    weights, _ = train_alone(1, 1, make_batches()[:3])
    for key, value in weights.items():
        if "running" not in key and "tracked" not in key:  # which count the batch that diverged
            torch.testing.assert_close(found[0].weights["task1"][key], value, **CLOSE)
    # A run that goes on from there does not train it either.
    saved = tmp_path / "saved"
    early = {"max_epochs": 1, "enable_checkpointing": True}
    run(train, replace(job, trainer=early), 2, num_ranks=2, folder=saved)
    (path,) = (path for path in saved.rglob("*.ckpt") if path.parent.name != "heads")
    on = Fanned(3, validates=False, checkpoint=str(path))
    resumed = run(train, on, 2, num_ranks=2, folder=tmp_path / "on")
    for rank in resumed:
        assert rank.stopped == {"task1": "its loss is inf"}
    for name, weights in found[0].weights.items():
        torch.testing.assert_close(resumed[0].weights[name], weights, **CLOSE)


@pytest.mark.slow
def test_all_heads_stop_at_some_time_and_the_run_with_them(tmp_path: Path) -> None:
    job = Fanned(3, patience=1, trainer={"max_epochs": 8})
    piped = run(train, job, 2, num_ranks=2, folder=tmp_path / "piped")
    alone = run(train, job, 1, num_ranks=1, folder=tmp_path / "alone")
    assert piped[0].stopped == piped[1].stopped == alone[0].stopped
    assert set(piped[0].stopped) == {"task0", "task1", "task2"}
    for name, weights in alone[0].weights.items():
        torch.testing.assert_close(piped[0].weights[name], weights, **CLOSE)
    written = files(tmp_path / "piped")
    for name, best in files(tmp_path / "alone").items():
        assert written[name]["epoch"] == best["epoch"]
        torch.testing.assert_close(written[name]["state_dict"], best["state_dict"], **CLOSE)


@pytest.mark.slow
def test_a_resumed_run_gives_what_one_gives_that_went_through(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Fanned(3, trainer={"max_epochs": 1, "enable_checkpointing": True}, validates=False)
    run(train, first, 2, num_ranks=2, folder=folder)
    (path,) = (path for path in folder.rglob("*.ckpt") if path.parent.name != "heads")
    job = Fanned(3, validates=False, checkpoint=str(path))
    check_weights(run(train, job, 3, num_ranks=3, folder=tmp_path / "on"), 3)


def check_weights(found: list[Outcome], num_heads: int) -> None:
    """Every head is as if it had been trained alone."""
    for index in range(num_heads):
        weights, _ = train_alone(index)
        torch.testing.assert_close(found[0].weights[f"task{index}"], weights, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("thawed", "the trunk has parameters that require gradients: 0.weight"),
        ("wide", r"head 'task0' does not fit the trunk: the features have shape \(5, 6\)"),
        ("inf", "head 'task1': its loss is inf"),
        ("plain", "derive Plain from FanoutTraining"),
        ("by hand", r"automatic_optimization=False does not work .* Write head_optimizer"),
        ("killed", "ended|closed|lost|Connection"),
    ],
)
def test_what_is_wrong_is_said_on_every_rank_in_time(
    tmp_path: Path, change: str, message: str
) -> None:
    job = run_job(break_it, change, num_ranks=2, folder=tmp_path, seconds=60)
    assert all(rank.exit_code for rank in job.ranks)
    assert re.search(message, job.output), job.output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b"}, r"schedule='1f1b' does not work with heads .*Use schedule='tspipe'"),
        ({"activation_checkpointing": True}, r"use torch\.utils\.checkpoint in its forward"),
        ({"num_stages": 1}, "Leave num_stages out"),
        ({"partition": [3, 3]}, r"partition=\[3, 3\].* must add up to 10"),
        ({"queue_depth": -1}, "queue_depth=-1: must be 'auto' or at least 0"),
        ({"memory_limit": 100}, r"head 'task0' alone needs .* but a rank may hold"),
    ],
)
def test_options_that_do_not_go_with_heads_are_refused_with_a_remedy(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    job = run_job(
        train, Fanned(options=options, validates=False), 2, num_ranks=2, folder=tmp_path, seconds=60
    )
    assert all(rank.exit_code for rank in job.ranks)
    assert re.search(message, job.output), job.output[-3000:]
