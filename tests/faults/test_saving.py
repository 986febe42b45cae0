"""Checkpoints that can't be written, or that were cut off."""

from __future__ import annotations

import io
import pickle
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.strategy.checkpoints import files
from lightning_tspipe.strategy.checkpoints.files import explain_damage, write_whole
from lightning_tspipe.strategy.checkpoints.folders import META_FILE, FolderSource
from tests.faults.breaking import (
    BYOL,
    SAVED,
    SECONDS,
    STRUCK,
    TEXT,
    Broken,
    Fault,
    fit,
    loads,
    num_tracebacks,
    over,
    run_broken,
    saving,
    strike,
)
from tests.integration.trainings import lightning_module

SLOW, SELDOM = pytest.mark.slow, pytest.mark.exhaustive
LIMIT = 4


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    job = run_broken(Broken(BYOL, Fault("full", "sync", 0), saving), tmp_path)
    assert num_tracebacks(job) == 1, job.output
    assert "No space left on device, so the checkpoint was not saved" in job.ranks[0].output
    assert "rank 1 stops too" in job.ranks[1].output
    saved = tmp_path / SAVED
    assert {path.name for path in saved.iterdir()} == {"same.ckpt", "last.ckpt"}
    assert loads(saved / "same.ckpt") == 4


class Slowly(TorchCheckpointIO):
    """Writes for so long that other things happen meanwhile."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        Path("writing").touch()
        time.sleep(3)
        super().save_checkpoint(checkpoint, path, storage_options)


class KilledWhileWriting(Callback):
    """Rank 1 ends while rank 0 writes."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and Path("writing").exists():
            strike(Fault("kill", "", 1))


def fit_async(broken: Broken) -> int:
    """A thread writes."""
    assert broken.fault is not None
    io = AsyncCheckpointIO(Slowly() if broken.fault.rank == 1 else None)
    training = replace(broken.training, trainer={**broken.training.trainer, "plugins": [io]})
    return fit(replace(broken, training=training))


def saving_often() -> list[Any]:
    return [ModelCheckpoint(SAVED, "{step}", every_n_train_steps=2, save_top_k=-1)]


def saving_often_and_dying() -> list[Any]:
    return [*saving_often(), KilledWhileWriting()]


@pytest.mark.parametrize("how", ["full", *(pytest.param(h, marks=SLOW) for h in ("raise", "kill"))])
def test_a_fault_in_a_thread_that_saves(how: str, tmp_path: Path) -> None:
    broken = Broken(BYOL, Fault(how, "sync", 0), saving_often)
    job = run_broken(broken, tmp_path, function=fit_async)
    assert num_tracebacks(job) == (how != "kill"), job.output
    assert "rank 1 stops too" in job.ranks[1].output
    if how == "full":
        assert "No space left on device, so the checkpoint was not saved" in job.ranks[0].output
    # What comes after the fault is not written either.
    assert last_of(tmp_path / SAVED) == 4


def last_of(folder: Path) -> int:
    """All checkpoints of a folder are whole; the step of the newest."""
    return max(loads(path) for path in folder.glob("*.ckpt"))


@SLOW
def test_a_fault_in_the_last_file_that_a_thread_saves(tmp_path: Path) -> None:
    """Nothing but the end of the run hears of it; the other rank does not end well either."""
    training = replace(BYOL, sizes=((5,) * 6,))
    broken = Broken(training, Fault("full", "sync", 0), saving_often)
    job = run_broken(broken, tmp_path, function=fit_async)
    assert num_tracebacks(job) == 1, job.output
    assert last_of(tmp_path / SAVED) == 4


@SLOW
def test_a_rank_is_killed_while_another_ones_thread_saves(tmp_path: Path) -> None:
    broken = Broken(BYOL, Fault("nothing", "", 1), saving_often_and_dying)
    job = run_broken(broken, tmp_path, function=fit_async)
    assert job.ranks[1].exit_code == -signal.SIGKILL
    assert num_tracebacks(job) == 0, job.output
    # The files that were under way are completed.
    assert last_of(tmp_path / SAVED) >= 2


@pytest.mark.parametrize(
    ("num_ranks", "how", "rank"),
    [
        (2, "kill", 1),
        *(
            pytest.param(*case, marks=mark)
            for *case, mark in [
                (2, "kill", 0, SELDOM), (2, "full", 0, SELDOM), (3, "full", 1, SLOW),
                (2, "raise", 1, SLOW), (4, "kill", 1, SELDOM), (4, "kill", 2, SLOW),
                (2, "stall", 1, SELDOM),
            ]
        ),
    ],
)  # fmt: skip
def test_a_fault_in_a_checkpoint_of_shards(
    num_ranks: int, how: str, rank: int, tmp_path: Path
) -> None:
    training = over(BYOL, num_ranks)
    options = {**training.options, "save_distributed_checkpoint": True}
    if how == "stall":
        options["timeout"] = timedelta(seconds=LIMIT)
    # The second replica saves nothing.
    fault = Fault(how, "save" if rank == 2 else "sync", rank)
    broken = Broken(replace(training, options=options), fault, saving_often)
    within = SECONDS + LIMIT * (how == "stall")
    job = run_broken(broken, tmp_path, within=within)
    if how in {"full", "raise"}:
        text = "No space left on device" if how == "full" else TEXT
        assert text in job.output
        assert num_tracebacks(job) == 1, job.output
        causes = re.findall(r"The job ends, because rank (\d)", job.output)
        assert len(causes) == 1
        if how == "raise":  # of a full disk all of them hear, and none is more to blame
            assert causes == [str(rank)], job.output
    else:
        assert num_tracebacks(job) == 0, job.output
    # Its place, and that of a link to it, is taken by a checkpoint that is complete only.
    folders = [path for path in (tmp_path / SAVED).glob("*.ckpt") if path.is_dir()]
    assert max(map(loads_shards, folders)) == 4


def loads_shards(path: Path) -> int:
    """Whether a folder of shards is whole; its step."""
    source = FolderSource(path)
    module = lightning_module("Byol-group-2-by hand", "lightning.pytorch", "sgd")
    module.load_state_dict(source.tensors(list(source.shapes)))
    names = [name for name, _ in module.student.named_parameters()]
    assert source.num_optimizers == 1
    assert source.optimizer_state(0, [], [f"student.{name}" for name in names])
    checkpoint = torch.load(path / META_FILE, weights_only=False)
    return int(checkpoint["global_step"])


@contextmanager
def small_files_only(limit: int) -> Iterator[None]:
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)


def test_a_file_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a.ckpt"
    write_whole({"x": torch.ones(2)}, path)
    with small_files_only(10_000), pytest.raises(OSError, match="File too large, so the") as caught:
        write_whole({"x": torch.ones(100_000)}, path)
    assert caught.value.filename == str(path)
    assert [file.name for file in path.parent.iterdir()] == ["a.ckpt"]
    assert torch.equal(torch.load(path)["x"], torch.ones(2))


def test_what_cannot_be_pickled_says_so(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="lambda"):
        write_whole({"x": lambda: None}, tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_a_file_is_written_is_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's writer then misses some bytes, and raises an exception of its own."""

    class Interrupted(io.BytesIO):
        def write(self, data: Any) -> int:
            if len(data) > 100_000:
                raise KeyboardInterrupt
            return super().write(data)

    @contextmanager
    def interrupted(path: Path) -> Iterator[io.BytesIO]:
        path.touch()
        yield Interrupted()

    monkeypatch.setattr(files, "written_through", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        write_whole({"x": torch.ones(100_000)}, tmp_path / "a.ckpt")
    assert caught.value.__suppress_context__
    assert not list(tmp_path.iterdir())


def test_a_truncated_checkpoint_is_named_on_every_rank(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.ckpt", tmp_path / "cut.ckpt"
    torch.save({"state_dict": {"x": torch.randn(3000)}}, whole)
    cut.write_bytes(whole.read_bytes()[:5000])
    (tmp_path / STRUCK).touch()
    job = run_broken(Broken(BYOL, ckpt_path=str(cut)), tmp_path, within=60)
    for rank in job.ranks:
        assert "CheckpointError" in rank.error
        assert "cut.ckpt' is not a complete checkpoint (5,000 bytes" in rank.output
        assert "Give another ckpt_path; its folder also has 'whole.ckpt'" in rank.output
    assert num_tracebacks(job) == 1, job.output


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "does not begin like one"),
        (b"something else", "does not begin like one"),
        (pickle.dumps({"x": pytest.raises}), "does not begin like one"),
        (b"PK\x03\x04 cut off", "was cut off"),
    ],
    ids=["empty", "text", "pickle", "cut off"],
)
def test_damage_is_explained(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(content)
    refused = pytest.raises(CheckpointError, match="not a complete checkpoint")
    with refused as found, explain_damage(path):
        torch.load(path)
    assert why in str(found.value)
    assert "weights_only" not in str(found.value)  # the advice to run what the file says


class Own:
    """Not among the classes that weights_only allows."""


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), FileNotFoundError("gone")])
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"x": Own()}, path)
    message = r"holds more than .*Own.*weights_only=False"
    with pytest.raises(CheckpointError, match=message), explain_damage(path):
        torch.load(path)
    with pytest.raises(type(error), match=str(error)), explain_damage(path):
        raise error
