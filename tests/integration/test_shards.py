"""Checkpoints in shards: what is in them, how they are written, and going on from them exactly."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from torch import Tensor

from lightning_tspipe import DelayedTeacherUpdate
from lightning_tspipe.strategy.checkpoints import writing
from lightning_tspipe.strategy.checkpoints.folders import META_FILE, FolderSource, is_sharded
from tests.integration.jobs import run, run_job
from tests.integration.on_meta import train_on_meta
from tests.integration.test_large import consolidated, one_device
from tests.integration.test_resume import BYOL, Run, Went, go, go_and_save
from tests.integration.trainings import CLOSE, Training

SPREAD = Run(
    replace(
        BYOL, case="Byol-group-2-by hand", optimizer="adamw",
        trainer={**BYOL.trainer, "accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
    ),
    is_built_late=True,
)  # fmt: skip


def together(ranks: list[Went]) -> Went:
    """The weights of all ranks; each is on one of them."""
    weights = {name: value for rank in ranks for name, value in rank.weights.items()}
    assert sum(len(rank.weights) for rank in ranks) == len(weights)
    return replace(ranks[0], weights=weights)


def check(whole: Went, resumed: Went, stop: int) -> None:
    assert len(resumed.losses) == 8 - stop
    assert resumed.steps == whole.steps
    torch.testing.assert_close(resumed.losses, whole.losses[stop:], **CLOSE)
    torch.testing.assert_close(resumed.weights, whole.weights, **CLOSE)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Went]:
    """A run that saved itself after every batch; what it came to."""
    folder = tmp_path_factory.mktemp("stopped")
    return folder, together(run(go_and_save, SPREAD, folder=folder))


@pytest.mark.parametrize(
    ("stop", "num_ranks"),
    [
        (2, 2),
        (5, 1),
        pytest.param(1, 3, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(5, 2, marks=pytest.mark.slow),
    ],
)
def test_shards_go_on_within_an_accumulated_step(
    stop: int, num_ranks: int, stopped: tuple[Path, Went], tmp_path: Path
) -> None:
    folder, whole = stopped
    it = replace(SPREAD, training=replace(SPREAD.training, num_ranks=num_ranks))
    path = folder / f"batch-{stop}.ckpt"
    ranks = run(go, it, str(path), num_ranks=num_ranks, folder=tmp_path)
    check(whole, together(ranks), stop)


def test_no_rank_collects_gradients(stopped: tuple[Path, Went]) -> None:
    folder, whole = stopped
    [entry] = torch.load(folder / "batch-2.ckpt" / META_FILE)["lightning_tspipe"]
    assert entry["gradients"] == {}
    trained = {name for name in whole.weights if name.startswith("student")}
    [gradients] = FolderSource(folder / "batch-2.ckpt").gradients(trained)
    assert gradients.keys() == {name for name in trained if "num" not in name}
    assert not FolderSource(folder / "batch-3.ckpt").gradients(trained)  # nothing was accumulated


@pytest.mark.slow
def test_one_file_that_was_made_of_shards(stopped: tuple[Path, Went], tmp_path: Path) -> None:
    folder, whole = stopped
    path = consolidated(folder / "batch-2.ckpt")
    check(whole, together(run(go, SPREAD, path, folder=tmp_path)), 2)
    alone = replace(SPREAD, training=replace(SPREAD.training, num_ranks=1), is_built_late=False)
    check(whole, run(go, alone, path, num_ranks=1, folder=tmp_path)[0], 2)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [True, False])
def test_a_run_that_is_over_saves_what_it_was_restored_from(shards: bool, tmp_path: Path) -> None:
    """No batch comes, for whose stages each rank would read its part of the optimizer."""
    options = {**SPREAD.training.options, "save_distributed_checkpoint": shards}
    it = replace(SPREAD, training=replace(SPREAD.training, options=options), is_built_late=False)
    longer = replace(it.training, trainer={**it.training.trainer, "max_epochs": 3})
    path, again = tmp_path / "epoch-8.ckpt", tmp_path / "again"
    run(go_and_save, it, folder=tmp_path)
    over = run(go, it, str(path), folder=again)[0]
    assert over.losses == []
    on, on_again = (
        run(go, replace(it, training=longer), str(each), folder=tmp_path)[0]
        for each in (path, again / "end.ckpt")
    )
    assert len(on.losses) == 4
    torch.testing.assert_close(on_again.losses, on.losses, **CLOSE)
    torch.testing.assert_close(on_again.weights, on.weights, **CLOSE)


class FailsAtStart(Callback):
    """Raises before there are optimizers, and saves then."""

    def setup(self, *_: Any, **__: Any) -> None:
        raise ValueError("at the start")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint("failed.ckpt")


def fail_at_start_and_go(it: Run) -> tuple[Went, Went]:
    with pytest.raises(ValueError, match="at the start"):
        go(it, callbacks=[FailsAtStart()])
    return go(it), go(it, "failed.ckpt")


def test_what_one_device_saves_before_it_has_optimizers_is_something_to_go_on_from(
    tmp_path: Path,
) -> None:
    """As Lightning's files are."""
    options = {**BYOL.options, "save_distributed_checkpoint": True}
    it = Run(replace(BYOL, options=options, num_ranks=1))
    ((whole, resumed),) = run(fail_at_start_and_go, it, num_ranks=1, folder=tmp_path)
    assert is_sharded(tmp_path / "failed.ckpt")
    assert len(resumed.losses) == len(whole.losses) == 8


class Watching(Callback):
    """Has the first folder wait, on rank 0, until the next batch begins; notes who writes."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self._goes_on = threading.Event()
        self._write = writing._write_through
        vars(writing)["_write_through"] = self._write_when_it_goes_on

    def _write_when_it_goes_on(self, content: bytes, path: Path) -> None:
        name = threading.current_thread().name
        self.threads.append(name if self._goes_on.wait(20) else "waited in vain")
        self._write(content, path)

    def on_train_batch_start(self, trainer: Any, _module: Any, _batch: Any, index: int) -> None:
        if index > 0 or trainer.current_epoch > 0:
            self._goes_on.set()

    def on_train_end(self, *_: Any) -> None:
        self._goes_on.set()


def two_best() -> list[Any]:
    return [
        DelayedTeacherUpdate(),
        ModelCheckpoint("saved", "{step}", monitor="train_loss", save_top_k=2, save_last="link",
                        every_n_train_steps=1),
    ]  # fmt: skip


SAVING = Training(
    "Byol-group-2-by hand", "instance", {"num_microbatches": 1}, optimizer="adamw",
    callbacks=two_best, trainer={"enable_checkpointing": True},
)  # fmt: skip


def train_meanwhile(training: Training) -> list[str]:
    watching = Watching()
    plugins = {"plugins": [AsyncCheckpointIO()]}
    callbacks = [*training.callbacks(), watching]
    train_on_meta(
        replace(training, callbacks=lambda: callbacks, trainer={**training.trainer, **plugins})
    )
    return watching.threads


def contents(folder: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for path in folder.iterdir():
        assert is_sharded(path)
        source = FolderSource(path)
        found[path.name] = source.tensors(source.shapes.keys())
    return found


@pytest.mark.slow
def test_shards_are_written_while_the_training_goes_on(tmp_path: Path) -> None:
    """The same best ones stay as when the training waits."""
    at_once, meanwhile = tmp_path / "at once", tmp_path / "meanwhile"
    run(train_on_meta, SAVING, folder=at_once)
    threads = run(train_meanwhile, SAVING, folder=meanwhile)
    assert set(threads[0]) == {"checkpoints"}
    assert len(threads[0]) >= 4  # some were replaced by better ones
    expected = contents(at_once / "saved")
    assert len(expected) == 3
    torch.testing.assert_close(contents(meanwhile / "saved"), expected, **CLOSE)


def train_on_a_full_disk(training: Training, rank: int, *, meanwhile: bool) -> None:
    """The system says so when a rank has written its second part."""
    sync, count = os.fsync, [0]

    def full(file: int) -> None:
        name = Path(f"/proc/self/fd/{file}").readlink().name
        count[0] += name.startswith(f"__{rank}_")
        if count[0] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    os.fsync = full  # type: ignore[assignment] # called with a number
    plugins = {"plugins": [AsyncCheckpointIO()]} if meanwhile else {}
    train_on_meta(replace(training, trainer={**training.trainer, **plugins}))


def write_always() -> list[Any]:
    return [
        DelayedTeacherUpdate(),
        ModelCheckpoint("saved", "same", every_n_train_steps=2, enable_version_counter=False),
    ]


@pytest.mark.parametrize(
    ("rank", "meanwhile"),
    [
        (1, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(0, False, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_leaves_the_shards_before(rank: int, meanwhile: bool, tmp_path: Path) -> None:
    training = replace(SAVING, callbacks=write_always)
    function = partial(train_on_a_full_disk, meanwhile=meanwhile)
    job = run_job(function, training, rank, folder=tmp_path)
    assert all(outcome.exit_code not in {0, None} for outcome in job.ranks), job.output
    told = "No space left on device, so the checkpoint was not saved; earlier ones are untouched"
    assert all(told in outcome.output for outcome in job.ranks), job.output
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["same.ckpt"]
    saved = tmp_path / "saved" / "same.ckpt"
    assert torch.load(saved / META_FILE)["global_step"] == 2
    assert contents(saved.parent)


class Elsewhere(CheckpointIO):
    """Keeps checkpoints where only it knows."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None: ...

    def load_checkpoint(self, *_: Any, **__: Any) -> Any: ...

    def remove_checkpoint(self, *_: Any) -> None: ...


def train_with_a_plugin(training: Training) -> None:
    plugins = [AsyncCheckpointIO(Elsewhere())]
    train_on_meta(replace(training, trainer={**training.trainer, "plugins": plugins}))


def test_a_plugin_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    options = {**SAVING.options, "save_distributed_checkpoint": True}
    alone = replace(one_device(SAVING), strategy="instance", options=options)
    job = run_job(train_with_a_plugin, alone, num_ranks=1, folder=tmp_path)
    assert "Elsewhere would not be used: a sharded checkpoint" in job.errors[0], job.output
