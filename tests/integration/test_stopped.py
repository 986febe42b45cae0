"""Going on exactly after a signal, and with another number of replicas."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from pytorch_lightning import Callback as OtherCallback
from torch import Tensor

from tests.choosing import some_of
from tests.exactness.modules import ema_by_hand
from tests.integration.jobs import run, run_job
from tests.integration.test_resume import (
    BYOL,
    EPOCHS,
    ONE,
    RUNS,
    Run,
    Went,
    check,
    go,
    go_and_save,
)


def averaged(module: Any) -> None:
    """A loss of a batch that is the mean of those of its parts."""

    def training_step(batch: Any) -> Tensor:
        ema_by_hand(module.teacher, module.student[0])
        first, second = batch["views"]
        student = module.student(first)
        with torch.no_grad():
            teacher = module.teacher(second)
        return -F.cosine_similarity(student, teacher).mean()

    module.training_step = training_step


@pytest.mark.parametrize(
    ("loader", "stop", "source"),
    some_of(
        [("plain", "epoch-4", 1), ("plain", "epoch-4", 2), ("fixed", "batch-2", 1),
         ("fixed", "batch-2", 2)],
        slow=[("plain", "epoch-4", 2), ("fixed", "batch-2", 1)],
    ),
)  # fmt: skip
def test_going_on_with_another_number_of_replicas(
    source: int, loader: str, stop: str, tmp_path: Path
) -> None:
    """They share the batches of the one loader; of the other each reads all."""
    options = {"accumulate_grad_batches": 3, "use_distributed_sampler": False}
    training = replace(
        BYOL, case="Byol-group-2-by hand", change=averaged, trainer={**EPOCHS, **options}
    )
    runs = {
        number: Run(replace(training, num_ranks=2 * number, options={**ONE, "num_stages": 2}),
                    loader)
        for number in (1, 2)
    }  # fmt: skip
    target = 3 - source
    folder = tmp_path / "resumed"
    ranks = run(go_and_save, runs[source], num_ranks=2 * source, folder=tmp_path)
    path = str(tmp_path / f"{stop}.ckpt")
    resumed = run(go, runs[target], path, num_ranks=2 * target, folder=folder)
    assert len(resumed[0].losses) == 8 - int(stop.split("-")[1])
    check(over_replicas(ranks), over_replicas(resumed))


def over_replicas(ranks: list[Went]) -> Went:
    """The first one, with the losses of the whole batches."""
    losses = torch.stack([torch.stack(rank.losses) for rank in ranks[::2]]).mean(0)
    return replace(ranks[0], losses=list(losses))


class Signal(Callback, OtherCallback):
    """A signal in the third batch, to the rank that then tells the others."""

    def __init__(self, number: int) -> None:
        self._number, self._batches = number, 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._batches += 1
        if self._batches == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), self._number)


def go_saving(it: Run, path: str | None, callbacks: Sequence[Any]) -> Went:
    last = ModelCheckpoint("stopped", "last", every_n_train_steps=100, save_on_exception=True)
    saving = replace(it.training, trainer={**it.training.trainer, "enable_checkpointing": True})
    return go(replace(it, training=saving), path, callbacks=[last, *callbacks])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    some_of(
        [*RUNS, "accumulation, shards"],
        slow=["accumulation, shards", *sorted(RUNS.keys() - {"accumulation"})[::4]],
        always=["accumulation"],
    ),
)
def test_going_on_from_what_sigterm_left(name: str, tmp_path: Path) -> None:
    if name == "torchdata":
        pytest.importorskip("torchdata")
    it = RUNS[name.split(", shards", maxsplit=1)[0]]
    if name.endswith("shards"):
        options = {**it.training.options, "save_distributed_checkpoint": True}
        it = replace(it, training=replace(it.training, options=options))
    whole = run(go, it, folder=tmp_path / "whole")
    args = None, [Signal(signal.SIGTERM)]
    job = run_job(go_saving, it, *args, folder=tmp_path)
    assert [outcome.exit_code for outcome in job.ranks] == [143, 143], job.output
    path = tmp_path / "stopped" / "last.ckpt"
    assert path.is_dir() == name.endswith("shards")
    resumed = run(go_saving, it, str(path), [], folder=tmp_path)
    for before, after in zip(whole, resumed, strict=True):
        assert 0 < len(after.losses) <= 5
        check(before, after)


def go_on_slurm(it: Run, callbacks: Sequence[Any]) -> Went:
    os.environ["PATH"] = os.pathsep.join([str(Path.cwd()), os.environ["PATH"]])
    return go(it, callbacks=callbacks)


@pytest.mark.parametrize("name", ["by hand", pytest.param("accumulation", marks=pytest.mark.slow)])
def test_going_on_after_slurm_has_requeued(name: str, tmp_path: Path) -> None:
    """From the file that the signal made, which is found without being named."""
    command = tmp_path / "scontrol"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    ranks = [
        run(go_on_slurm, RUNS[name], callbacks, folder=tmp_path, launcher="slurm")
        for callbacks in ([Signal(signal.SIGUSR1)], [])
    ]
    for before, after in zip(*ranks, strict=True):
        assert len(before.losses) == 8
        assert 0 < len(after.losses) <= 5
        check(before, after)
