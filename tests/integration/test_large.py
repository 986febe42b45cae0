"""Models that no host can hold: built without values, checkpointed in shards."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_tspipe import DelayedTeacherUpdate, MomentumEMA, TSPipeStrategy
from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.strategy.checkpoints import folders
from lightning_tspipe.strategy.checkpoints.folders import is_sharded, newest, take_place_of
from tests.exactness.modules import CASES, make_epochs
from tests.integration.jobs import run, run_job
from tests.integration.on_meta import meta_module, peak_of_own_memory, train_on_meta, train_whole
from tests.integration.test_exact import assert_same, reference
from tests.integration.test_trainer import add_validation, validation_batches
from tests.integration.trainings import (
    CLOSE,
    RESUMING,
    SIZES,
    Epochs,
    Session,
    Trained,
    Training,
    delayed,
    lightning_module,
    metrics_of,
    quiet_trainer,
    strict,
    trainer_of,
)

LATE = Training("Byol-batch-2-by hand", "instance", {"num_microbatches": 1}, optimizer="adamw")
THREE_EPOCHS = (*SIZES, (4, 4, 3, 1))


def together(ranks: list[Trained]) -> Trained:
    """What the ranks hold, as one; each tensor must be there exactly once."""
    names = {name for rank in ranks for name in (*rank.weights, *rank.meta)}
    weights = {name: value for rank in ranks for name, value in rank.weights.items()}
    assert weights.keys() == names
    assert sum(len(rank.weights) for rank in ranks) == len(names)
    assert [bool(rank.meta) for rank in ranks] == [len(ranks) > 1] * len(ranks)
    return replace(ranks[0], weights=weights)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_module_that_nobody_holds_whole_trains_as_on_one_device(
    num_ranks: int, tmp_path: Path
) -> None:
    training = replace(LATE, num_ranks=num_ranks)
    ranks = run(train_on_meta, training, num_ranks=num_ranks, folder=tmp_path)
    assert_same(reference(training), together(ranks))


class Tower(LightningModule):
    """A student and its teacher, each of many equal layers.

    Attributes:
        peak: By how much the memory has grown at most.
        held: Before the first backward, and at the end: that, and what this rank holds.
    """

    num_layers, width = 20, 1300

    def __init__(self) -> None:
        super().__init__()
        self.student: nn.Module | None = None
        self.peak = [0]
        self.held: list[tuple[int, int]] = []

    def configure_model(self) -> None:
        if self.student is None:
            layers = (nn.Linear(self.width, self.width) for _ in range(self.num_layers))
            self.student = nn.Sequential(*layers)
            self.teacher = copy.deepcopy(self.student)

    def training_step(self, batch: Tensor, _index: int) -> Tensor:
        assert self.student is not None
        student = self.student(batch)
        with torch.no_grad():
            teacher = self.teacher(batch)
        return (student - teacher.roll(1, 0)).square().mean()

    def on_before_zero_grad(self, _optimizer: Any) -> None:
        if not self.held:
            self.note()

    def note(self) -> None:
        """Note what this rank holds: values, gradients, the state of the optimizer."""
        here = [p for p in self.parameters() if not p.is_meta]
        optimizer = self.trainer.optimizers[0]
        states = [value for p in here for value in optimizer.state.get(p, {}).values()]
        tensors = [*here, *(p.grad for p in here if p.grad is not None), *states]
        self.held.append((self.peak[0], sum(t.numel() * t.element_size() for t in tensors)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.student is not None
        return torch.optim.AdamW(self.student.parameters(), lr=0.1)


def grow(ckpt_path: str | None = None) -> list[tuple[int, int]]:
    """A fit that saves itself."""
    strict(RESUMING)
    torch.set_default_dtype(torch.float32)
    module = Tower()
    one_file = {"save_distributed_checkpoint": False} if ckpt_path == "" else {}
    trainer = quiet_trainer(
        devices=2, strategy=TSPipeStrategy(**one_file), max_epochs=2 if ckpt_path else 1,
        enable_checkpointing=True,
        callbacks=[MomentumEMA(), ModelCheckpoint("saved", "{epoch}", save_top_k=-1)],
    )  # fmt: skip
    loader = Epochs([[torch.randn(2, module.width)] * 2])
    with peak_of_own_memory() as module.peak:
        trainer.fit(module, loader, ckpt_path=ckpt_path or None)
    module.note()
    return module.held


@pytest.mark.slow
@pytest.mark.parametrize("one_file", [False, True])
def test_no_process_ever_holds_the_whole_module(one_file: bool, tmp_path: Path) -> None:
    """From the first batch to the last checkpoint, and when it goes on from that."""
    begun = run(grow, "" if one_file else None, num_ranks=2, folder=tmp_path)
    saved = tmp_path / "saved" / "epoch=0.ckpt"
    assert saved.is_file() == one_file
    resumed = run(grow, str(saved), num_ranks=2, folder=tmp_path)
    for run_of_ranks in ([] if one_file else [begun], [resumed]):
        for at_once in (moment for ranks in run_of_ranks for moment in zip(*ranks, strict=True)):
            everything = sum(held for _, held in at_once)
            # How many layers are whose is measured, and differs a little from run to run.
            more = [peak - held for peak, held in at_once]
            assert max(more) < 0.25 * everything, (at_once, everything)
            assert sum(peak for peak, _ in at_once) > 0.9 * everything, (at_once, everything)


def save_epochs() -> list[Any]:
    return [
        DelayedTeacherUpdate(),
        ModelCheckpoint(dirpath="saved", filename="{epoch}", save_top_k=-1, every_n_epochs=1),
    ]


SAVING = replace(
    LATE, callbacks=save_epochs, sizes=THREE_EPOCHS, trainer={"enable_checkpointing": True}
)


def one_device(training: Training) -> Training:
    return replace(training, strategy="auto", num_ranks=1, options={})


def with_shards(training: Training, num_ranks: int = 2) -> Training:
    options = {**training.options, "save_distributed_checkpoint": True}
    return replace(training, options=options, num_ranks=num_ranks)


def assert_goes_on(expected: Any, actual: Trained) -> None:
    """The third epoch is that of a run that never stopped."""
    torch.testing.assert_close(actual.losses, expected.losses[8:], **CLOSE)
    torch.testing.assert_close(actual.weights, expected.weights, **CLOSE)


def consolidated(folder: Path) -> str:
    """One file, made by Lightning's own tool."""
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    subprocess.run([*command, folder], check=True, capture_output=True, timeout=100)  # noqa: S603 - ours
    return f"{folder}.consolidated"


@pytest.mark.slow
def test_shards_are_resumed_by_any_number_of_ranks_and_without_a_pipeline(tmp_path: Path) -> None:
    first, *others = (tmp_path / name for name in ("first", "three", "plain"))
    expected = reference(SAVING)
    ranks = run(train_on_meta, SAVING, num_ranks=2, folder=first)
    assert_same(expected, together(ranks))
    saved = first / "saved" / "epoch=1.ckpt"
    assert sorted(path.name for path in saved.parent.iterdir()) == [
        f"epoch={n}.ckpt" for n in range(3)
    ]
    assert {path.suffix for path in saved.iterdir()} == {"", ".distcp", ".json", ".pt"}
    three = replace(LATE, num_ranks=3, sizes=THREE_EPOCHS)
    ranks = run(train_on_meta, three, str(saved), num_ranks=3, folder=others[0])
    assert_goes_on(expected, together(ranks))
    path = consolidated(saved)
    plain = replace(one_device(LATE), callbacks=delayed, sizes=THREE_EPOCHS)
    assert_goes_on(expected, run(train_whole, plain, path, num_ranks=1, folder=others[1])[0])


def fit_and_validate(training: Training, ckpt_path: str, make: Any) -> tuple[Any, ...]:
    """Validation before the first step, in a fit, after it; and of a checkpoint, alone."""
    strict()
    torch.manual_seed(0)
    known = CASES[training.case].build()
    results: list[Any] = []
    for epochs in (0, 2, 0):
        module = make(training.case, training.world, training.optimizer)
        add_validation(module)
        trainer = trainer_of(training, module)
        if epochs:
            trainer.fit(module, Epochs(make_epochs(known, training.sizes)), validation_batches())
            results.append(metrics_of(trainer))
            trainer.save_checkpoint(ckpt_path)
        path = ckpt_path if len(results) > 1 and not epochs else None
        results += trainer.validate(module, validation_batches(), path, False, weights_only=False)
    return tuple(results)


def test_evaluation_of_a_module_that_nobody_holds_whole(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    training = Training(
        "Classifier-batch", "instance", {"num_microbatches": 1}, trainer={"num_sanity_val_steps": 2}
    )
    args = "saved.ckpt", meta_module
    expected = run(fit_and_validate, one_device(training), *args, num_ranks=1, folder=alone)[0]
    ranks = run(fit_and_validate, training, *args, num_ranks=2, folder=together)
    for fitted in (rank[1] for rank in ranks):
        assert fitted == pytest.approx(expected[1], rel=1e-9)
    assert len(expected) == len(ranks[0]) == 4
    for mine, theirs in zip(ranks[0], expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    assert expected[2] == expected[3] != expected[0]
    assert (together / "saved.ckpt").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("train", [train_on_meta, train_whole])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whole_modules_are_saved_in_shards_too(train: Any, num_ranks: int, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    expected = reference(SAVING)
    saving = with_shards(SAVING, 3 - num_ranks)
    run(train_whole, saving, num_ranks=3 - num_ranks, folder=first)
    resumed = replace(LATE, num_ranks=num_ranks, sizes=THREE_EPOCHS)
    path = str(first / "saved" / "epoch=1.ckpt")
    ranks = run(train, resumed, path, num_ranks=num_ranks, folder=second)
    weights = {name: value for rank in ranks for name, value in rank.weights.items()}
    assert_goes_on(expected, replace(ranks[0], weights=weights))


@pytest.mark.parametrize("num_ranks", [2])
def test_one_file_is_loaded_into_a_module_that_nobody_holds_whole(
    num_ranks: int, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(train_whole, one_device(SAVING), num_ranks=1, folder=first)
    resumed = replace(LATE, num_ranks=num_ranks, sizes=THREE_EPOCHS)
    path = str(first / "saved" / "epoch=1.ckpt")
    ranks = run(train_on_meta, resumed, path, num_ranks=num_ranks, folder=second)
    assert_goes_on(reference(SAVING), together(ranks))


def fit_twice(training: Training, make: Any, *, another: bool = False) -> Trained:
    """By one Trainer: a module as ``make`` builds it, then the same again or another, whole one."""
    loader = Epochs(make_epochs(CASES[training.case].build(), training.sizes))
    made = make(training.case, training.world, training.optimizer)
    it = Session(training, module=made).fit(loader)
    it.trainer.fit_loop.max_epochs += 1
    if another:
        it.module = lightning_module(training.case, training.world, training.optimizer)
    return it.fit(loader).trained


@pytest.mark.slow
def test_a_spread_module_is_trained_again(tmp_path: Path) -> None:
    expected, ranks = (
        run(fit_twice, LATE, make, num_ranks=2, folder=tmp_path)
        for make in (lightning_module, meta_module)
    )
    torch.testing.assert_close(ranks[0].losses, expected[0].losses, **CLOSE)
    torch.testing.assert_close(together(ranks).weights, expected[0].weights, **CLOSE)


@pytest.mark.slow
def test_another_module_after_a_spread_one(tmp_path: Path) -> None:
    expected, ranks = (
        run(partial(fit_twice, another=True), LATE, make, num_ranks=2, folder=tmp_path)
        for make in (lightning_module, meta_module)
    )
    torch.testing.assert_close(ranks[0].losses, expected[0].losses, **CLOSE)
    torch.testing.assert_close(ranks[0].weights, expected[0].weights, **CLOSE)


def train_initialised(training: Training) -> Trained:
    it = Session(training, module=CASES[training.case].build())
    with it.trainer.init_module(empty_init=True):
        it.module = lightning_module(training.case, training.world, training.optimizer)
    assert all(p.is_meta for p in it.module.parameters())
    return it.fit().trained


def test_a_module_that_is_built_before_the_fit(tmp_path: Path) -> None:
    ranks = run(train_initialised, LATE, num_ranks=2, folder=tmp_path)
    assert_same(reference(LATE), together(ranks))


def train_without_values(training: Training) -> None:
    with torch.device("meta"):
        module = lightning_module(training.case, training.world, training.optimizer)
    trainer_of(training, module).fit(module, Epochs(make_epochs(module, training.sizes)))


def test_a_module_without_any_values_is_refused(tmp_path: Path) -> None:
    job = run_job(train_without_values, LATE, num_ranks=2, folder=tmp_path)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert any("Build the module in configure_model" in error for error in job.errors), job.errors


def train_and_die(training: Training) -> None:
    """Rank 0 is killed in the middle of its second checkpoint."""
    ends: list[Path] = []

    def end(part: Path, path: Path) -> None:
        ends.append(part)
        if len(ends) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        take_place_of(part, path)

    vars(folders)["take_place_of"] = end
    train_on_meta(training)


def save_over_and_over() -> list[Any]:
    return [DelayedTeacherUpdate(), ModelCheckpoint("saved", "last", enable_version_counter=False)]


def test_a_run_that_is_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    saving = replace(SAVING, callbacks=save_over_and_over)
    job = run_job(train_and_die, saving, num_ranks=2, folder=first)
    assert all(rank.exit_code != 0 for rank in job.ranks)
    resumed = replace(LATE, num_ranks=1, sizes=SIZES)
    path = str(first / "saved" / "last.ckpt")
    result = run(train_on_meta, resumed, path, num_ranks=1, folder=second)[0]
    torch.testing.assert_close(result.losses, reference(SAVING).losses[4:8], **CLOSE)


def test_a_replacement_that_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, part = tmp_path / "a.ckpt", tmp_path / ".a.ckpt.part"
    path.write_text("old")
    part.mkdir()
    rename = Path.rename

    def stop(self: Path, target: Path) -> Path:
        if self == part:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        take_place_of(part, path)
    assert newest(path).read_text() == "old"
    monkeypatch.undo()
    take_place_of(part, path)
    assert newest(path) == path
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    with pytest.raises(CheckpointError, match="not a complete sharded checkpoint"):
        is_sharded(path)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_replicas_of_a_spread_module(zero_stage: int, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = {**LATE.options, "num_stages": 2, "zero_stage": zero_stage}
    saving = replace(SAVING, options=options, num_ranks=4)  # both replicas read the same batches
    ranks = run(train_on_meta, saving, num_ranks=4, folder=first)
    expected = reference(SAVING)
    assert_same(expected, together(ranks[:2]))
    torch.testing.assert_close(together(ranks[2:]).weights, expected.weights, **CLOSE)
    path = str(first / "saved" / "epoch=1.ckpt")
    resumed = replace(LATE, num_ranks=2, sizes=THREE_EPOCHS)
    assert_goes_on(
        expected, together(run(train_on_meta, resumed, path, num_ranks=2, folder=second))
    )
