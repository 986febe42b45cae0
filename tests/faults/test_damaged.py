"""Runs that go on from a damaged checkpoint: one rank says what is wrong, and all end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tspipe.strategy.checkpoints.folders import CONTENTS_FILE, META_FILE, TABLE_FILE
from tests.faults.breaking import BYOL, Broken, fit, num_tracebacks
from tests.integration.jobs import Job, run_job

SLOW = pytest.mark.slow
SHORT = replace(BYOL, sizes=((5,) * 3,), trainer={"enable_checkpointing": True})


def saving_all() -> list[Any]:
    return [ModelCheckpoint("saved", "{step}", every_n_train_steps=1, save_top_k=-1)]


def saved(folder: Path, *, shards: bool) -> Path:
    """Checkpoints after each of three steps; the second."""
    options = {**SHORT.options, "save_distributed_checkpoint": shards}
    broken = Broken(replace(SHORT, options=options), callbacks=saving_all)
    job = run_job(fit, broken, num_ranks=2, folder=folder)
    assert [rank.exit_code for rank in job.ranks] == [0, 0], job.output
    return folder / "saved" / "step=2.ckpt"


def resume(path: Path, folder: Path, function: Any = fit, **options: Any) -> Job:
    folder.mkdir(exist_ok=True)
    training = replace(SHORT, options={**SHORT.options, **options})
    return run_job(function, Broken(training, ckpt_path=str(path)), num_ranks=2, folder=folder)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("shards"), shards=True)


def flip_in_the_middle(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("__1_0.distcp", flip_in_the_middle),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [
                ("__0_0.distcp", flip_in_the_middle), (CONTENTS_FILE, flip_in_the_middle),
                (META_FILE, flip_in_the_middle), (TABLE_FILE, flip_in_the_middle),
                ("__1_0.distcp", cut_off), (META_FILE, cut_off), (META_FILE, Path.unlink),
                ("__1_0.distcp", Path.unlink),
            ]
        ),
    ],
)  # fmt: skip
def test_damaged_shards_are_named_once(
    name: str, damage: Callable[[Path], None], shards: Path, tmp_path: Path
) -> None:
    file = shards / name
    content = file.read_bytes()
    damage(file)
    try:
        job = resume(shards, tmp_path)
    finally:
        file.write_bytes(content)
    check_refused(job, name)


def check_refused(job: Job, *told: str) -> None:
    assert all(rank.exit_code not in {0, None} for rank in job.ranks), job.output
    assert num_tracebacks(job) == 1, job.output
    lines = [line for line in job.output.splitlines() if "CheckpointError: " in line]
    assert all(all(text in line for text in told) for line in lines), job.output
    assert any("its folder also has 'step=" in line for line in lines), job.output
    assert not any("During handling" in rank.output for rank in job.ranks), job.output


@SLOW
def test_a_damaged_file_is_named_once_or_read_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path, shards=False)
    content = bytearray(path.read_bytes())
    state = torch.load(path, weights_only=False)["state_dict"]
    weight = next(value for name, value in state.items() if name.startswith("student"))
    content[content.index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(content)
    check_refused(resume(path, tmp_path / "refused"), "step=2.ckpt' is damaged: the record")
    job = resume(path, tmp_path / "read", verify_checkpoint=False)
    assert [rank.exit_code for rank in job.ranks] == [0, 0], job.output


def without_checksums(broken: Broken) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(broken)
    return [str(one.message) for one in found if "checksums" in str(one.message)]


@SLOW
def test_a_folder_without_checksums_goes_on_with_one_warning(shards: Path, tmp_path: Path) -> None:
    table, meta = (shards / TABLE_FILE).read_bytes(), (shards / META_FILE).read_bytes()
    rest = torch.load(shards / META_FILE, weights_only=False)
    (shards / TABLE_FILE).unlink()
    try:
        check_refused(resume(shards, tmp_path / "lost"), "its checksums.json is missing")
        rest.pop("lightning_tspipe_checksums")
        torch.save(rest, shards / META_FILE)
        job = resume(shards, tmp_path / "never there", without_checksums)
    finally:
        (shards / TABLE_FILE).write_bytes(table)
        (shards / META_FILE).write_bytes(meta)
    assert [rank.exit_code for rank in job.ranks] == [0, 0], job.output
    (first, second) = (rank.value for rank in job.ranks)
    assert len(first) == 1
    assert "has no checksums: it is loaded without verification" in first[0]
    assert second == []
