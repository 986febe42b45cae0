"""SIGTERM at any rank stops all ranks after the same batch, with a checkpoint if one is wished."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.breaking import (
    BYOL,
    SAVED,
    Broken,
    Fault,
    evaluate,
    fit,
    loads,
    over,
    run_broken,
    saving,
)
from tests.integration.jobs import Job, run

SELDOM = pytest.mark.exhaustive
LONG = replace(BYOL, trainer={**BYOL.trainer, "max_epochs": 1000, "val_check_interval": 40})


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank"),
    [
        (2, "train", 0),
        (3, "train", 1),
        (4, "train", 2),  # the loss rank of the second replica
        pytest.param(2, "train", 1, marks=SELDOM),
        pytest.param(2, "validate", 0, marks=pytest.mark.slow),
        pytest.param(2, "validate", 1, marks=SELDOM),
        pytest.param(3, "plan", 2, marks=SELDOM),
        pytest.param(3, "plan", 1, marks=pytest.mark.slow),
        pytest.param(4, "plan", 2, marks=SELDOM),
        pytest.param(3, "save", 1, marks=pytest.mark.slow),
    ],
)
def test_sigterm_stops_all_ranks_together(
    num_ranks: int, where: str, rank: int, tmp_path: Path
) -> None:
    broken = Broken(over(LONG, num_ranks), Fault("sigterm", where, rank), saving)
    stopped_together(run_broken(broken, tmp_path), rank)
    saved = tmp_path / SAVED
    assert loads(saved / "exception.ckpt") >= loads(saved / "same.ckpt") >= 1


def stopped_together(job: Job, rank: int) -> None:
    assert {outcome.exit_code for outcome in job.ranks} == {143}, job.output
    assert all("SIGTERMException" in error for error in job.errors), job.output
    assert "Traceback" not in job.output
    assert "stops too" not in job.output
    (told,) = re.findall("SIGTERM to rank (\\d+): all ranks stop after this batch", job.output)
    assert int(told) == rank


@pytest.mark.slow
def test_a_long_validation_is_stopped_though_replicas_have_not_the_same_batches(
    tmp_path: Path,
) -> None:
    """The second replica is at its end; the first one would take hours."""
    training = replace(LONG, trainer={**LONG.trainer, "val_check_interval": 6})
    fault = Fault("sigterm", "validate", 0)
    broken = Broken(over(training, 4), fault, saving, validated=(10**7, 2))
    stopped_together(run_broken(broken, tmp_path), 0)
    assert loads(tmp_path / SAVED / "exception.ckpt") == 6


def by_the_loss_rank_alone(module: Any) -> None:
    """A step that can't be captured: what is called depends on an output."""

    def step(batch: Any, batch_idx: int) -> Any:
        output = module.student(batch)
        return output if output.sum() > 0 else module.student(-batch)

    module.evaluated = step


ENDLESS = (10**7, 10**7)


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank", "validated"),
    [
        (1, "validate", 0, ENDLESS),
        (2, "predict", 0, ENDLESS),
        (4, "test", 2, (10**7, 5)),
        pytest.param(4, "test", 2, ENDLESS, marks=SELDOM),
        pytest.param(1, "predict", 0, ENDLESS, marks=SELDOM),
        pytest.param(3, "validate", 1, ENDLESS, marks=pytest.mark.slow),
        pytest.param(4, "predict", 1, (10**7, 5), marks=SELDOM),
        pytest.param(4, "validate", 2, (5, 10**7), marks=pytest.mark.slow),
        # In the last batch.
        pytest.param(1, "validate", 0, (4,), marks=SELDOM),
        pytest.param(2, "test", 1, (4,), marks=pytest.mark.slow),
        pytest.param(4, "predict", 3, (4, 4), marks=SELDOM),
    ],
)
def test_sigterm_ends_an_evaluation_outside_a_fit(
    num_ranks: int, where: str, rank: int, validated: tuple[int, ...], tmp_path: Path
) -> None:
    broken = Broken(over(BYOL, num_ranks), Fault("sigterm", where, rank), validated=validated)
    stopped_together(run_broken(broken, tmp_path, function=evaluate), rank)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [None, 1])
def test_sigterm_ends_an_evaluation_without_a_pipeline(
    num_stages: int | None, tmp_path: Path
) -> None:
    """The loss rank evaluates alone, of one pipeline or of each replica."""
    options = {**BYOL.options, "num_stages": num_stages}
    training = replace(BYOL, options=options, num_ranks=3, change=by_the_loss_rank_alone)
    broken = Broken(training, Fault("sigterm", "test", 1), validated=(10**7,) * 3)
    stopped_together(run_broken(broken, tmp_path, function=evaluate), 1)


@pytest.mark.parametrize(
    ("where", "step"),
    [
        ("train", 6),  # the batch that has begun is trained
        pytest.param("validate", 40, marks=pytest.mark.slow),
    ],
)
def test_one_device_does_as_several(where: str, step: int, tmp_path: Path) -> None:
    broken = Broken(over(LONG, 1), Fault("sigterm", where, 0), saving)
    stopped_together(run_broken(broken, tmp_path), 0)
    assert loads(tmp_path / SAVED / "exception.ckpt") == step


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_after_the_last_step_sigterm_is_not_lost(num_ranks: int, tmp_path: Path) -> None:
    broken = Broken(over(BYOL, num_ranks), Fault("sigterm", "end", 1), saving)
    stopped_together(run_broken(broken, tmp_path), 1)
    saved = tmp_path / SAVED
    assert loads(saved / "exception.ckpt") == loads(saved / "same.ckpt") == 40


def fit_where_scontrol_is(broken: Broken) -> int:
    os.environ["PATH"] = os.pathsep.join([str(Path.cwd()), os.environ["PATH"]])
    return fit(broken)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_slurm_requeues_once_with_a_checkpoint_of_all_ranks(rank: int, tmp_path: Path) -> None:
    command = tmp_path / "scontrol"
    command.write_text('#!/bin/sh\necho "$@" >> requeued\n')
    command.chmod(0o755)
    broken = Broken(replace(LONG, sizes=((5,) * 500,), trainer={}), Fault("sigusr1", "train", rank))
    results = run(fit_where_scontrol_is, broken, folder=tmp_path, launcher="slurm")
    assert results == [500, 500]
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    assert 6 <= loads(tmp_path / "hpc_ckpt_1.ckpt") <= 500
