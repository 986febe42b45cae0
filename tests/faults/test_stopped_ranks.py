"""A rank that is stopped (SIGSTOP) is given up after the timeout, and killed; rank 0 too."""

from __future__ import annotations

import itertools
import re
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.choosing import some_of
from tests.faults.breaking import (
    BYOL,
    PHASES,
    STRUCK,
    Broken,
    Fault,
    num_tracebacks,
    run_broken,
    saving,
)
from tests.integration.scripts import output_of, processes_in, started, wait_for

LIMIT = 8
GRACE = 10
"""All processes have ended so many seconds after the limit."""
STOPPED = replace(BYOL, options={"num_microbatches": 1, "timeout": timedelta(seconds=LIMIT)})
CAUSE = (
    r"The job ends, because rank {rank} \(pid \d+ on \S+\) was stopped .* in {phase} and "
    r"the others gave up waiting for it\. It is killed now"
)


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank"),
    some_of(
        [(2, "train", 0), (2, "train", 1), (3, "train", 0), (3, "train", 2), (2, "setup", 0),
         (2, "plan", 1), (2, "validate", 0), (2, "save", 1), (2, "end", 0)],
        slow=[(3, "train", 2), (2, "setup", 0), (2, "save", 1)],
        always=[(2, "train", 0)],
    ),
)  # fmt: skip
def test_it_is_given_up(num_ranks: int, where: str, rank: int, tmp_path: Path) -> None:
    broken = Broken(replace(STOPPED, num_ranks=num_ranks), Fault("sigstop", where, rank), saving)
    job = run_broken(broken, tmp_path, within=LIMIT + GRACE)
    assert job.ranks[rank].exit_code == -signal.SIGKILL
    cause = CAUSE.format(rank=rank, phase=PHASES[where])
    assert len(re.findall(cause, job.output)) == 1, job.output
    assert job.output.count("The job ends, because") == 1, job.output
    assert num_tracebacks(job) == 0, job.output


SCRIPT = """
import sys
from dataclasses import replace

import torch

from tests.faults.breaking import Broken, Fault, fit
from tests.faults.test_stopped_ranks import STOPPED

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    start_method, rank = sys.argv[1:]
    options = {**STOPPED.options, "start_method": start_method}
    training = replace(STOPPED, options=options, trainer={"max_epochs": 1000})
    fit(Broken(training, Fault("sigstop", "train", int(rank))))
"""


@pytest.mark.parametrize(
    ("method", "rank"),
    some_of(
        [*itertools.product(("popen", "fork"), (0, 1)), ("spawn", 0), ("forkserver", 1)],
        slow=[("popen", 0)],
    ),
)
def test_whoever_starts_the_ranks(method: str, rank: int, tmp_path: Path) -> None:
    command = [sys.executable, "script.py", method, str(rank)]
    with started(tmp_path, SCRIPT, command) as (process,):
        wait_for([tmp_path / STRUCK], process)
        deadline = (tmp_path / STRUCK).stat().st_mtime + LIMIT + GRACE
        while processes_in(tmp_path) and time.time() < deadline:
            process.poll()
            time.sleep(0.1)
        assert not processes_in(tmp_path), output_of(tmp_path)
    text = output_of(tmp_path)
    assert process.returncode != 0
    assert re.search(CAUSE.format(rank=rank, phase="training step 6"), text), text
    assert "Traceback" not in text, text
