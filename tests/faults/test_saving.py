"""Checkpoints that can't be written, or that were cut off."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.strategy.files import explain_damage, write_whole
from tests.faults.breaking import (
    BYOL,
    SAVED,
    STRUCK,
    Broken,
    fit,
    loads,
    num_tracebacks,
    run_broken,
    saving,
)


def fit_on_a_full_disk(broken: Broken) -> int:
    """The system says so when the third file is to reach the disk."""
    sync, count = os.fsync, [0]

    def full(file: int) -> None:
        count[0] += 1
        if count[0] == 3:
            Path(STRUCK).touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    os.fsync = full  # type: ignore[assignment] # called with a number
    return fit(broken)


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    job = run_broken(Broken(BYOL, None, saving), tmp_path, function=fit_on_a_full_disk)
    assert num_tracebacks(job) == 1, job.output
    assert "No space left on device, so the checkpoint was not saved" in job.ranks[0].output
    assert "rank 1 stops too" in job.ranks[1].output
    saved = tmp_path / SAVED
    assert {path.name for path in saved.iterdir()} == {"same.ckpt", "last.ckpt"}
    assert loads(saved / "same.ckpt") == 4


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


def test_a_truncated_checkpoint_is_named_on_every_rank(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.ckpt", tmp_path / "cut.ckpt"
    torch.save({"state_dict": {"x": torch.randn(3000)}}, whole)
    cut.write_bytes(whole.read_bytes()[:5000])
    (tmp_path / STRUCK).touch()
    job = run_broken(Broken(BYOL, ckpt_path=str(cut)), tmp_path, within=60)
    for rank in job.ranks:
        assert "CheckpointError" in rank.error
        assert "cut.ckpt' is no complete checkpoint (it has 5,000 bytes" in rank.output
        assert "Give ckpt_path another one; beside it lie 'whole.ckpt'" in rank.output
    assert num_tracebacks(job) == 1, job.output


@pytest.mark.parametrize("content", [b"", b"something else", b"PK\x03\x04 cut off"])
def test_damage_is_explained(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="no complete checkpoint"), explain_damage(path):
        torch.load(path)


class Own:
    """Not among the classes that weights_only allows."""


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), FileNotFoundError("gone")])
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"x": Own()}, path)
    with pytest.raises(Exception, match="Weights only load failed"), explain_damage(path):
        torch.load(path)
    with pytest.raises(type(error), match=str(error)), explain_damage(path):
        raise error
