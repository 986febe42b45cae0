"""Nothing outlives a start-up that failed: whoever is killed, the others end within seconds."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.choosing import some_of
from tests.integration.scripts import output_of, processes_in, started, wait_for

SCRIPT = """
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

START_METHOD, WHERE = sys.argv[1:]
RANK = os.environ.get("LOCAL_RANK", "0")


def pause(where):
    rank = os.environ.get("LOCAL_RANK", "0")
    if where == WHERE:
        Path(f"here-{rank}.part").write_text(str(os.getpid()))
        Path(f"here-{rank}.part").rename(f"here-{rank}")
        if rank == "0" or where == "imports":
            time.sleep(1000)


if "LOCAL_RANK" in os.environ:
    pause("imports")

import torch

from lightning_tspipe.strategy.lightning import run
from lightning_tspipe.strategy.lightning.namespaces import Namespace, installed_namespaces
from tests.faults.breaking import BYOL, Broken, fit

meet, set_up = run.meet, run.Run.join
connect = installed_namespaces()[0].init_dist_connection


def paused_meet(*args, **kwargs):
    pause("meeting")
    job = meet(*args, **kwargs)
    Path("met").touch()
    return job


def failing_set_up(self, *args):
    if WHERE == "failing" and os.environ.get("LOCAL_RANK") == "1":
        while not Path("met").exists():
            time.sleep(0.05)
        raise ValueError("a mistake of the user's own")
    set_up(self, *args)


def paused_connection(self, *args, **kwargs):
    pause("connecting")
    return connect(*args, **kwargs)


run.meet = paused_meet
run.Run.join = failing_set_up
Namespace.init_dist_connection = paused_connection

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    options = {**BYOL.options, "start_method": START_METHOD}
    fit(Broken(replace(BYOL, options=options, trainer={"max_epochs": 1000})))
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SECONDS = 25.0
IMPORTS = 90.0


def command_of(method: str, where: str) -> list[str]:
    first = TORCHRUN if method == "torchrun" else [sys.executable]
    return [*first, "script.py", "popen" if method == "torchrun" else method, where]


def pids_of(folder: Path) -> dict[int, int]:
    return {rank: int((folder / f"here-{rank}").read_text()) for rank in (0, 1)
            if (folder / f"here-{rank}").exists()}  # fmt: skip


def all_end(folder: Path, seconds: float = SECONDS) -> str:
    deadline = time.monotonic() + seconds
    while processes_in(folder):
        assert time.monotonic() < deadline, output_of(folder)
        time.sleep(0.1)
    return output_of(folder)


@pytest.mark.parametrize(
    ("method", "where", "rank"),
    some_of(
        [
            ("popen", "imports", 0), ("popen", "imports", 1), ("popen", "meeting", 0),
            ("popen", "connecting", 0), ("popen", "connecting", 1), ("fork", "meeting", 0),
            ("fork", "connecting", 0), ("fork", "connecting", 1), ("spawn", "meeting", 0),
            ("forkserver", "meeting", 0), ("torchrun", "meeting", 0), ("torchrun", "connecting", 0),
        ],
        slow=[("popen", "connecting", 0), ("torchrun", "meeting", 0)],
    ),
)  # fmt: skip
def test_a_rank_is_killed(method: str, where: str, rank: int, tmp_path: Path) -> None:
    with started(tmp_path, SCRIPT, command_of(method, where)) as (process,):
        # Under "imports", rank 0 is the script that was started, which does not pause.
        ranks = [1] if where == "imports" else [0, 1]
        wait_for([tmp_path / f"here-{rank}" for rank in ranks], process)
        pid = process.pid if where == "imports" and rank == 0 else pids_of(tmp_path)[rank]
        time.sleep(1)  # the other one gets on
        os.kill(pid, signal.SIGKILL)
        with suppress(Exception):
            process.wait(SECONDS)
        text = all_end(tmp_path)
    assert process.returncode != 0
    assert num_explanations(text) == 0, text
    if where == "connecting" and method != "torchrun":  # whose agent tells of it
        assert re.search(
            rf"The job ends, because rank {rank} \(pid {pid} on \S+\) .*start-up", text
        ), text


def num_explanations(text: str) -> int:
    """Tracebacks; torchrun's agent explains itself, at the end."""
    return text.partition("torch/distributed/elastic")[0].count("Traceback")


@pytest.mark.parametrize(
    ("method", "where"),
    some_of(
        itertools.product(
            ("fork", "spawn", "forkserver", "torchrun"), ("meeting", "connecting", "nowhere")
        ),
        slow=[("fork", "meeting"), ("spawn", "connecting"), ("torchrun", "nowhere")],
    ),
)  # fmt: skip
def test_the_process_that_starts_them_is_killed(method: str, where: str, tmp_path: Path) -> None:
    with started(tmp_path, SCRIPT, command_of(method, where)) as (process,):
        if where == "nowhere":
            deadline = time.monotonic() + 90
            while len(processes_in(tmp_path)) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(3)
        else:
            wait_for([tmp_path / "here-0"], process)
        process.kill()
        process.wait()
        # While they import, only what was forked ends at once; the others do when they get on.
        all_end(tmp_path, IMPORTS if where == "nowhere" else SECONDS)


@pytest.mark.parametrize(
    "method", some_of(["popen", "fork", "forkserver"], slow=["popen"], always=["fork"])
)
def test_a_failure_before_the_ranks_have_met_is_told_by_its_traceback(
    method: str, tmp_path: Path
) -> None:
    """The launcher ends the others by a signal, which is no cause."""
    with started(tmp_path, SCRIPT, command_of(method, "failing")) as (process,):
        process.wait(IMPORTS)
        text = all_end(tmp_path)
    assert process.returncode == 1
    assert text.count("ValueError: a mistake of the user's own") == 1, text
    causes = re.findall(r"The job ends, because (rank \d) .* in the start-up", text)
    assert set(causes) == {"rank 1"}, text
    assert "did not notice" not in text, text


@pytest.mark.slow
def test_the_parent_is_killed_right_after_a_fork(tmp_path: Path) -> None:
    """Before the worker could ask to be ended with it."""
    for number in (0, 1, 3):
        folder = tmp_path / str(number)
        with started(folder, SCRIPT, command_of("fork", "nowhere")) as (process,):
            deadline = time.monotonic() + 90
            while len(processes_in(folder)) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.02 * number)
            process.kill()
            process.wait()
            all_end(folder)
