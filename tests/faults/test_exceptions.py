"""An exception on one rank is told once, and ends all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.breaking import (
    BYOL,
    SAVED,
    TEXT,
    Broken,
    Fault,
    evaluate,
    loads,
    num_tracebacks,
    over,
    run_broken,
    saving,
)
from tests.integration.jobs import Job


def told_once(job: Job, rank: int, kind: str = "ValueError") -> None:
    assert job.ranks[rank].error.startswith(kind), job.output
    assert num_tracebacks(job) == 1, job.output
    # In the last line of the traceback, and nowhere else but in the source line above it.
    assert len(re.findall(f"{kind}: .*{TEXT}", job.ranks[rank].output)) == 1, job.output
    for number, outcome in enumerate(job.ranks):
        assert ("stops too" in outcome.output) == (number != rank), job.output


CASES = [("step", 0), ("train", 1), ("worker", -1)]
MORE = [("setup", 1), ("plan", 0), ("train", 0), ("dataset", -1), ("validate", 0), ("save", 1),
        ("end", 1)]  # fmt: skip


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank"),
    [
        *((2, *case) for case in CASES),
        *(pytest.param(2, *case, marks=pytest.mark.slow) for case in MORE[::2]),
        *(pytest.param(2, *case, marks=pytest.mark.exhaustive) for case in MORE[1::2]),
        pytest.param(3, *CASES[1], marks=pytest.mark.slow),
        *(
            pytest.param(3, *case, marks=pytest.mark.exhaustive)
            for case in (*CASES[::2], ("plan", 1))
        ),
    ],
)
def test_it_is_told_once(num_ranks: int, where: str, rank: int, tmp_path: Path) -> None:
    fault = Fault("raise", where, rank % num_ranks)
    kind = "CaptureError" if where == "plan" else "ValueError"
    told_once(
        run_broken(Broken(over(BYOL, num_ranks), fault, saving), tmp_path), rank % num_ranks, kind
    )


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_nothing_is_saved_of_a_failure(rank: int, tmp_path: Path) -> None:
    """Two callbacks ask for it; the ranks that hold the other stages may be gone."""
    job = run_broken(Broken(BYOL, Fault("raise", "train", rank), saving), tmp_path)
    told_once(job, rank)
    assert "no checkpoint was saved on this failure" in job.ranks[0].output
    saved = tmp_path / SAVED
    assert {path.name for path in saved.iterdir()} == {"same.ckpt", "last.ckpt"}
    assert loads(saved / "last.ckpt") == loads(saved / "same.ckpt") == 4


OUTSIDE = [(2, "validate", 0), (2, "predict", 1), (3, "predict", 2)]


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank"),
    [(2, "test", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in OUTSIDE)],
)
def test_it_is_told_once_outside_a_fit(
    num_ranks: int, where: str, rank: int, tmp_path: Path
) -> None:
    broken = Broken(over(BYOL, num_ranks), Fault("raise", where, rank), validated=(10**7,))
    told_once(run_broken(broken, tmp_path, function=evaluate), rank)


@pytest.mark.slow
def test_a_replica_that_evaluates_alone_is_ended(tmp_path: Path) -> None:
    """It waits for nobody, so nothing but its watch tells it of a failure in another replica."""
    broken = Broken(over(BYOL, 4), Fault("raise", "test", 2), validated=(10**7, 10**7))
    job = run_broken(broken, tmp_path, function=evaluate)
    assert job.ranks[2].error.startswith("ValueError")
    assert num_tracebacks(job) == 1, job.output
    # How it says so depends on where it was: between two batches, or waiting for its neighbour.
    assert "(the cause: rank 2 (pid" in job.ranks[0].output + job.ranks[1].output
