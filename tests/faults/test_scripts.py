"""The same faults where Lightning starts the processes: the whole job ends, and tells why."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.choosing import some_of
from tests.faults.breaking import SAVED, SECONDS, STRUCK, TEXT, loads
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
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OTHERS = ("spawn", "forkserver", "torchrun")
CASES = [
    ("fork", "raise", "train", 1),
    *(("popen", "raise", *place) for place in [("step", 0), ("dataset", 1), ("train", 1)]),
    ("popen", "raise", "train", 0),
    *(("fork", "raise", *place) for place in [("step", 0), ("dataset", 1)]),
    *((method, "kill", "train", rank) for method in ("popen", "fork") for rank in (0, 1)),
    *((method, "sigterm", "train", rank) for method in ("popen", "fork") for rank in (0, 1)),
    *((method, "stall", "step", rank) for method in ("popen", "fork") for rank in (0, 1)),
    *((method, "raise", "train", 1) for method in OTHERS), ("torchrun", "raise", "step", 0),
    ("spawn", "kill", "train", 0), ("forkserver", "kill", "train", 1),
    *(("torchrun", "kill", "train", rank) for rank in (0, 1)),
    ("spawn", "sigterm", "train", 1), ("torchrun", "sigterm", "train", 1),
]  # fmt: skip
SLOW = [
    ("fork", "raise", "train", 1), ("popen", "raise", "step", 0), ("popen", "sigterm", "train", 1),
    ("fork", "stall", "step", 1), ("torchrun", "kill", "train", 0),
]  # fmt: skip


def command_of(method: str, how: str, where: str, rank: int) -> list[str]:
    first = TORCHRUN if method == "torchrun" else [sys.executable]
    start_method = "popen" if method == "torchrun" else method
    return [*first, "script.py", start_method, how, where, str(rank)]


def end_of(process: subprocess.Popen[bytes], folder: Path, seconds: float = SECONDS) -> str:
    """Wait until all of a job has ended, not with 0; what it has printed."""
    deadline = time.monotonic() + seconds
    try:
        code = process.wait(seconds)
        while processes_in(folder) and time.monotonic() < deadline:
            time.sleep(0.1)
    except subprocess.TimeoutExpired:
        code = 0
    assert code != 0, output_of(folder)
    assert not processes_in(folder), output_of(folder)
    return output_of(folder)


@pytest.mark.parametrize(("method", "how", "where", "rank"), some_of(CASES, slow=SLOW))
def test_the_job_ends(method: str, how: str, where: str, rank: int, tmp_path: Path) -> None:
    with started(tmp_path, SCRIPT, command_of(method, how, where, rank)) as (process,):
        wait_for([tmp_path / STRUCK], process)
        text = end_of(process, tmp_path, SECONDS + (4 if how == "stall" else 0))
    if how == "raise":
        # The cause's alone, though a parent raises too; torchrun's tells of itself.
        number = 2 if method == "torchrun" else 1
        assert text.count("Traceback (most recent call last)") == number, text
        assert text.count(f"ValueError: {TEXT}") == 1, text
        assert re.search(rf"because rank {rank} \(pid \d+ on \S+\) raised ValueError in", text), (
            text
        )
        assert "the script's own finally ran" in text
    elif how == "sigterm":
        assert "all ranks stop after this batch" in text
        if method != "torchrun":
            assert process.returncode == 143, text
        assert "Traceback" not in text.partition("torch/distributed/elastic")[0], text
    elif how == "stall" and rank == 1:
        assert re.search(r"rank 0 could not receive from rank 1", text), text
    if how in {"stall", "kill"}:
        assert "Traceback" not in text.partition("torch/distributed/elastic")[0], text
        assert text.count("The job ends, because") == 1, text
    if how == "kill":
        killed = rf"because rank {rank} \(pid \d+ on \S+\) (was killed by SIGKILL|ended)"
        assert re.search(f"{killed} in training step", text), text
    if how != "stall":
        assert max(loads(path) for path in (tmp_path / SAVED).glob("*.ckpt")) >= 4


@pytest.mark.parametrize(
    ("method", "where"),
    some_of(
        [*((method, "train") for method in ("popen", "fork", "spawn", "forkserver", "torchrun")),
         ("torchrun", "worker")],
        slow=[("popen", "train"), ("fork", "train"), ("torchrun", "worker")],
    ),
)  # fmt: skip
def test_sigterm_to_the_process_that_was_started(method: str, where: str, tmp_path: Path) -> None:
    """With workers, that is none of the ranks; they stop together, and save, all the same.

    So they do where torchrun sends the signal to the workers of loaders too.
    """
    with started(tmp_path, SCRIPT, command_of(method, "nothing", where, 0)) as (process,):
        wait_for([tmp_path / STRUCK], process)
        process.terminate()
        text = end_of(process, tmp_path)
    assert text.count("all ranks stop after this batch") == 1, text
    assert "stops too" not in text
    if method != "torchrun":
        assert process.returncode == 143
    assert loads(tmp_path / SAVED / "exception.ckpt") >= 5


BETWEEN = """
import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from tests.faults.breaking import BYOL, STRUCK, Broken, fit

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    options = {**BYOL.options, "timeout": timedelta(seconds=1000)}
    training = replace(BYOL, options=options, sizes=((5,) * 3,))
    fit(Broken(training))
    print("between the runs", flush=True)
    how, rank = sys.argv[1], int(sys.argv[2])
    if rank == int(os.environ.get("LOCAL_RANK", 0)):
        Path(STRUCK).touch()
        if how == "raise":
            raise ValueError("an error between two runs")
        os.kill(os.getpid(), signal.SIGKILL)
    fit(Broken(training))
    print("both runs are over", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "rank"),
    some_of(itertools.product(("raise", "kill"), (0, 1)), slow=[("raise", 0), ("kill", 1)]),
)
def test_a_rank_that_ends_between_two_runs_is_named(how: str, rank: int, tmp_path: Path) -> None:
    """Others that have begun the second one need not wait until the timeout."""
    with started(tmp_path, BETWEEN, [sys.executable, "script.py", how, str(rank)]) as (process,):
        wait_for([tmp_path / STRUCK], process)
        text = end_of(process, tmp_path)
    assert "between the runs" in text
    assert "both runs are over" not in text
    assert text.count("Traceback (most recent call last)") == int(how == "raise"), text
    told = rf"The job ends, because rank {rank} \(pid \d+ on \S+\) (was killed by SIGKILL|ended\b)"
    assert len(re.findall(told, text)) == 1, text
    assert "in the script, after a run" in text


@pytest.mark.parametrize(
    "method", some_of(["popen", "fork", "spawn", "forkserver"], slow=["popen", "spawn"])
)
def test_ctrl_c(method: str, tmp_path: Path) -> None:
    """It comes to all processes of the terminal."""
    with started(tmp_path, SCRIPT, command_of(method, "nothing", "train", 0)) as (process,):
        wait_for([tmp_path / STRUCK], process)
        os.killpg(process.pid, signal.SIGINT)
        text = end_of(process, tmp_path)
    assert process.returncode == 1
    assert "Traceback" not in text, text
    assert len(re.findall(r"because rank \d \(.*\) raised KeyboardInterrupt in", text)) == 1, text
    assert loads(tmp_path / SAVED / "same.ckpt") >= 2


ALONE = """
import time
from dataclasses import replace

import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_tspipe.strategy.checkpoints import writing
from tests.faults.breaking import BYOL, Broken, Fault, fit, over, saving

sync = writing._sync_folder
writing._sync_folder = lambda path: (time.sleep(2), sync(path))

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    options = {**BYOL.options, "start_method": "fork", "save_distributed_checkpoint": True}
    trainer = {**BYOL.trainer, "plugins": AsyncCheckpointIO()}
    training = replace(over(BYOL, 1), options=options, trainer=trainer)
    fit(Broken(training, Fault("sigterm", "train", 0), saving))
"""


@pytest.mark.slow
def test_one_worker_has_written_what_it_saves_at_its_end(tmp_path: Path) -> None:
    """In shards, while the training goes on: so nothing else waits for it."""
    with started(tmp_path, ALONE, [sys.executable, "script.py"]) as (process,):
        wait_for([tmp_path / STRUCK], process)
        text = end_of(process, tmp_path)
    assert process.returncode == 143, text
    names = {path.name for path in (tmp_path / SAVED).iterdir()}
    assert "exception.ckpt" in names, text
    assert not [name for name in names if name.endswith(".part")], text
