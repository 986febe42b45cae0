"""The same faults where Lightning starts the processes: the whole job ends, and tells why."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.breaking import SECONDS, STRUCK, TEXT
from tests.integration.scripts import output_of, processes_in, started, wait_for

SCRIPT = """
import sys
from dataclasses import replace
from datetime import timedelta

import torch

from tests.faults.breaking import BYOL, Broken, Fault, fit, saving

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    start_method, how, where, rank = sys.argv[1:]
    options = {**BYOL.options, "start_method": start_method}
    if how == "stall":
        options["timeout"] = timedelta(seconds=4)
    trainer = {**BYOL.trainer, "max_epochs": 1000}
    training = replace(BYOL, options=options, trainer=trainer)
    try:
        fit(Broken(training, Fault(how, where, int(rank)), saving))
    finally:
        print("the script's own finally ran")
"""
CASES = [("popen", "raise", "train", 0), ("fork", "raise", "train", 1)]
MORE = [
    *(("popen", "raise", *place) for place in [("step", 0), ("dataset", 1), ("train", 1)]),
    *(("fork", "raise", *place) for place in [("step", 0), ("dataset", 1)]),
    *((method, "kill", "train", rank) for method in ("popen", "fork") for rank in (0, 1)),
    *((method, "sigterm", "train", rank) for method in ("popen", "fork") for rank in (0, 1)),
    *((method, "stall", "step", rank) for method in ("popen", "fork") for rank in (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "how", "where", "rank"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_the_job_ends(method: str, how: str, where: str, rank: int, tmp_path: Path) -> None:
    command = [sys.executable, "script.py", method, how, where, str(rank)]
    with started(tmp_path, SCRIPT, command) as (process,):
        wait_for([tmp_path / STRUCK], process)
        deadline = time.monotonic() + SECONDS + (4 if how == "stall" else 0)
        try:
            code = process.wait(deadline - time.monotonic())
            while processes_in(tmp_path) and time.monotonic() < deadline:
                time.sleep(0.1)
        except subprocess.TimeoutExpired:
            code = 0
        assert code != 0, output_of(tmp_path)
        assert not processes_in(tmp_path), output_of(tmp_path)
    text = output_of(tmp_path)
    if how == "raise":
        # A parent's traceback quotes the worker's.
        assert text.count("Traceback (most recent call last)") == (1 if method == "popen" else 2)
        assert text.count(f"ValueError: {TEXT}") == 1, text
        assert "the script's own finally ran" in text
    elif how == "sigterm":
        assert "all ranks stop after this batch" in text
        assert code == 143 if method == "popen" else "exit code 143" in text, text
    elif how == "stall" and rank == 1:
        assert re.search(r"rank 0 could not receive from rank 1", text), text
