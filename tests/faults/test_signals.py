"""SIGTERM at any rank stops all ranks after the same batch, with a checkpoint if one is wished."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.breaking import BYOL, SAVED, Broken, Fault, fit, loads, over, run_broken, saving
from tests.integration.jobs import run

LONG = replace(BYOL, trainer={**BYOL.trainer, "max_epochs": 1000, "val_check_interval": 40})


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank"),
    [
        (2, "train", 0),
        (3, "train", 1),
        (4, "train", 2),  # the loss rank of the second replica
        pytest.param(2, "train", 1, marks=pytest.mark.slow),
        pytest.param(2, "validate", 0, marks=pytest.mark.slow),
        pytest.param(2, "validate", 1, marks=pytest.mark.slow),
        pytest.param(3, "plan", 2, marks=pytest.mark.slow),
        pytest.param(3, "plan", 1, marks=pytest.mark.slow),
        pytest.param(4, "plan", 2, marks=pytest.mark.slow),
        pytest.param(3, "save", 1, marks=pytest.mark.slow),
    ],
)
def test_sigterm_stops_all_ranks_together(
    num_ranks: int, where: str, rank: int, tmp_path: Path
) -> None:
    broken = Broken(over(LONG, num_ranks), Fault("sigterm", where, rank), saving)
    job = run_broken(broken, tmp_path)
    assert [outcome.exit_code for outcome in job.ranks] == [143] * num_ranks, job.output
    assert all("SIGTERMException" in error for error in job.errors), job.output
    assert "Traceback" not in job.output
    assert "stops too" not in job.output
    assert job.output.count("all ranks stop after this batch") == 1
    saved = tmp_path / SAVED
    assert loads(saved / "exception.ckpt") >= loads(saved / "same.ckpt") >= 1


def fit_where_scontrol_is(broken: Broken) -> int:
    os.environ["PATH"] = os.pathsep.join([str(Path.cwd()), os.environ["PATH"]])
    return fit(broken)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_slurm_requeues_once_with_a_checkpoint_of_all_ranks(rank: int, tmp_path: Path) -> None:
    command = tmp_path / "scontrol"
    command.write_text('#!/bin/sh\necho "$@" >> requeued\n')
    command.chmod(0o755)
    broken = Broken(replace(LONG, sizes=((5,) * 500,), trainer={}), Fault("sigusr1", "train", rank))
    results = run(fit_where_scontrol_is, broken, folder=tmp_path, launcher="slurm")
    assert results == [500, 500]
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    assert 6 <= loads(tmp_path / "hpc_ckpt_1.ckpt") <= 500
