"""A rank that fails takes the job with it, soon, and its cause is told once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
from torch.utils.data import DataLoader, Dataset

from tests.exactness.modules import make_epochs
from tests.integration.jobs import Job, run_job
from tests.integration.trainings import Epochs, Training, lightning_module, trainer_of

TRAINING = Training(sizes=((5,) * 200,), strategy="instance", options={"num_microbatches": 2})
FAULT = "this is the user's own mistake"
SECONDS = 15.0


@dataclass(frozen=True)
class Fault:
    """What goes wrong in the fourth step, and on which rank."""

    kind: str
    rank: int


class Breaking(lightning.pytorch.Callback, pytorch_lightning.Callback):
    """Fails in a hook, or kills its process."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            Path(f"broken-{trainer.global_rank}").touch()
        if trainer.global_step != 3 or trainer.global_rank != self._fault.rank:
            return
        if self._fault.kind == "callback":
            raise ValueError(FAULT)
        if self._fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


class BrokenData(Dataset[Any]):
    """One of its batches can't be read."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise ValueError(FAULT)
        return self._batches[index]


def train_with(training: Training, fault: Fault) -> None:
    module = lightning_module(training.case, training.world, training.optimizer)
    batches = make_epochs(module, training.sizes)[0]
    loader: Any = Epochs([batches])
    if fault.kind in {"dataset", "worker"}:
        loader = DataLoader(
            BrokenData(batches), batch_size=None, num_workers=int(fault.kind == "worker"),
            multiprocessing_context="fork" if fault.kind == "worker" else None,
        )  # fmt: skip
    if fault.kind == "step":
        step = module.training_step

        def broken(batch: Any, batch_idx: int) -> Any:
            loss = step(batch, batch_idx)
            if batch_idx == 3:
                raise ValueError(FAULT)
            return loss

        module.training_step = broken
    trainer_of(training, module, Breaking(fault)).fit(module, loader)


def ended_soon(job: Job, broken: int) -> None:
    assert all(rank.exit_code not in {0, None} for rank in job.ranks), job.output
    slowest = max(rank.seconds for rank in job.ranks)
    assert slowest - job.ranks[broken].seconds < SECONDS, job.output


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("kind", "place"),
    [("step", 0), ("callback", 0), ("callback", -1), ("dataset", -1), ("worker", -1)],
)
def test_an_exception_is_told_once(kind: str, place: int, num_ranks: int, tmp_path: Path) -> None:
    rank = place % num_ranks
    training = replace(TRAINING, num_ranks=num_ranks)
    job = run_job(train_with, training, Fault(kind, rank), num_ranks=num_ranks, folder=tmp_path)
    ended_soon(job, rank)
    assert job.ranks[rank].error.startswith("ValueError"), job.output
    text = job.ranks[rank].output
    assert FAULT in text
    assert "Traceback (most recent call last)" in text
    for other, outcome in enumerate(job.ranks):
        if other != rank:
            assert "Traceback" not in outcome.output
            assert "stops too" in outcome.output


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_killed_rank_ends_the_others(num_ranks: int, rank: int, tmp_path: Path) -> None:
    training = replace(TRAINING, num_ranks=num_ranks)
    job = run_job(train_with, training, Fault("kill", rank), num_ranks=num_ranks, folder=tmp_path)
    ended_soon(job, rank)
    assert job.ranks[rank].exit_code == -signal.SIGKILL
    assert "Traceback" not in job.output
    assert f"rank {rank}" in job.output


SCRIPT = """
from pathlib import Path
from tests.integration.test_faults import Fault, TRAINING, train_with
import sys, torch

torch.set_default_dtype(torch.float64)
try:
    train_with(TRAINING, Fault(sys.argv[1], int(sys.argv[2])))
finally:
    print("the script's own finally ran")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank"), [("step", 0), ("dataset", 1), ("callback", 1), ("kill", 1)]
)
def test_a_script_that_lightning_launches(kind: str, rank: int, tmp_path: Path) -> None:
    script(kind, rank, tmp_path)


def test_a_script_that_fails(tmp_path: Path) -> None:
    script("callback", 0, tmp_path)


def script(kind: str, rank: int, folder: Path) -> None:
    """``python script.py``; Lightning starts the second process itself."""
    path = folder / "script.py"
    path.write_text(SCRIPT)
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    # Of another session's job.
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        environment.pop(name, None)
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, str(path), kind, str(rank)],
            cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            began = _wait_for(folder / f"broken-{rank}", process)
            code = process.wait(SECONDS)
            _wait_for_group(process.pid, began + SECONDS)
        finally:
            _kill_group(process.pid)
            process.wait()
    text = (folder / "output.txt").read_text()
    assert code != 0
    if kind != "kill":
        assert text.count("Traceback (most recent call last)") == 1, text
        # In the traceback's last line, and nowhere else but in the source line above it.
        assert text.count(f"ValueError: {FAULT}") == 1, text
        assert "the script's own finally ran" in text


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> float:
    deadline = time.monotonic() + 90
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert path.exists(), (path.parent / "output.txt").read_text()
    return time.monotonic()


def _wait_for_group(group: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("processes of the job are still there")


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
