"""A rank that stalls is named, with what was waited for, and ended."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.faults.breaking import BYOL, SECONDS, Broken, Fault, run_broken, saving

SLOW, SELDOM = pytest.mark.slow, pytest.mark.exhaustive
LIMIT = 4
STALLS = replace(
    BYOL, options={"num_microbatches": 1, "timeout": timedelta(seconds=LIMIT)}, num_ranks=2
)

WAITED = "rank 0 could not receive from rank 1"
GIVES_UP = r"The job ends, because rank \d \(pid \d+ on \S+\) gave up waiting in training step \d+:"


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank", "what"),
    [
        # The last stage is on rank 0, which needs what the first one makes.
        (2, "step", 1, rf"{GIVES_UP} .*rank 0 could not receive from rank 1"),
        *(
            pytest.param(*case, marks=mark)
            for *case, mark in [
                (2, "step", 0, rf"{GIVES_UP} BACKWARD stage 0 .* needs .* from rank 0", SELDOM),
                (3, "step", 1, r"rank 0 .*: .* needs FORWARD stage 1 unit .* from rank 1", SLOW),
                (2, "validate", 1, rf"the start of a step: {WAITED}", SELDOM),
                (2, "save", 1, rf"saving a checkpoint: {WAITED}", SLOW),
            ]
        ),
    ],
)  # fmt: skip
def test_it_is_named(num_ranks: int, where: str, rank: int, what: str, tmp_path: Path) -> None:
    broken = Broken(replace(STALLS, num_ranks=num_ranks), Fault("stall", where, rank), saving)
    job = run_broken(broken, tmp_path, within=LIMIT + SECONDS)
    assert re.search(what, job.output), job.output
    assert f"within {LIMIT} s" in job.output, job.output
    assert "Traceback" not in job.output, job.output
    stalled = job.ranks[rank].output
    ended = rf"rank {rank} \(pid \d+ on \S+\) is terminated: another rank failed"
    assert re.search(ended, stalled), job.output
    assert job.output.count("The job ends, because") == 1, job.output
    assert "in strike" in stalled  # where it was
