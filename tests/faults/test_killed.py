"""A rank that is killed takes the job with it, in whatever phase."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.choosing import some_of
from tests.faults.breaking import (
    BYOL,
    PHASES,
    SAVED,
    Broken,
    Fault,
    evaluate,
    loads,
    named_once,
    num_tracebacks,
    over,
    run_broken,
    saving,
)
from tests.integration.trainings import Training

CASES = [(2, "train", 0), (2, "validate", 1), (2, "write", 0), (2, "end", 1)]
MORE = [
    *((2, where, rank) for where in ("setup", "plan", "save") for rank in (0, 1)),
    (2, "train", 1), (2, "validate", 0), (2, "end", 0), (2, "worker", 1),
    *((3, "train", rank) for rank in range(3)), (3, "plan", 1), (3, "end", 1), (3, "save", 2),
    (4, "train", 3), (4, "save", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank"), some_of([*CASES, *MORE], slow=MORE[::4], always=CASES)
)
def test_it_ends_the_others(num_ranks: int, where: str, rank: int, tmp_path: Path) -> None:
    check_end(over(BYOL, num_ranks), where, rank, tmp_path)


SAVED_BEFORE = {"train": 4, "validate": 6, "save": 4, "write": 4, "end": 40}
"""The step of the checkpoint that is left; every other step, a file replaces the last one."""


def check_end(training: Training, where: str, rank: int, folder: Path) -> None:
    """A rank is killed somewhere: the others end, one line names it, the last checkpoint loads."""
    job = run_broken(Broken(training, Fault("kill", where, rank), saving), folder)
    if where == "worker":  # its rank says so
        assert num_tracebacks(job) == 1, job.output
        assert "killed by signal" in job.ranks[rank].output
    else:
        assert job.ranks[rank].exit_code == -signal.SIGKILL
        assert "Traceback" not in job.output, job.output
        assert named_once(job, rank, PHASES[where]), job.output
    if where == "worker":  # which reads ahead: how far the training is then, nobody knows
        assert loads(folder / SAVED / "same.ckpt") >= 4
    elif where in SAVED_BEFORE:
        saved = SAVED_BEFORE[where]
        # Rank 0 may still be writing what another rank has sent right before it was killed.
        possible = {saved} if rank == 0 or where not in {"validate", "end"} else {saved, saved - 2}
        assert loads(folder / SAVED / "same.ckpt") in possible


NAMES = {"validate": "validation", "test": "test", "predict": "prediction"}
OUTSIDE = [(2, "validate", 1), (2, "predict", 0), (3, "predict", 1), (4, "test", 2)]


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank"),
    [(2, "test", 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in OUTSIDE)],
)
def test_it_ends_the_others_outside_a_fit(
    num_ranks: int, where: str, rank: int, tmp_path: Path
) -> None:
    broken = Broken(over(BYOL, num_ranks), Fault("kill", where, rank), validated=(10**7, 10**7))
    job = run_broken(broken, tmp_path, function=evaluate)
    assert job.ranks[rank].exit_code == -signal.SIGKILL
    assert "Traceback" not in job.output, job.output
    phase = f"batch 3 of the {NAMES[where]}"
    assert named_once(job, rank, phase), job.output
