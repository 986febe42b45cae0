"""A training that is killed again and again, and that its launcher starts again each time.

A folder holds all there is between two starts::

    kills.json     where to kill, in order
    killed-0, ...  what was killed so far
    losses.txt     a line for each batch: ranks, epoch, batch, loss
    saved/         checkpoints: files and folders of shards by turns
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_tspipe import AutoResume, TSPipeStrategy
from tests.exactness.modules import images
from tests.integration.trainings import lightning_module, quiet_trainer, strict

EPOCHS, BATCHES = 3, 7
KILLS, LOSSES, SAVED, ALONE = "kills.json", "losses.txt", "saved", "alone"
WHERE = ("before", "after", "saving", "writing", "soon")
Line = tuple[int, int, int, float]


@dataclass(frozen=True)
class Kill:
    """One of them.

    Attributes:
        batch: Batches of the whole training before it.
        rank: Whose process.
        where: Within the batch; ``node``: with the launcher of its node.
    """

    batch: int
    rank: int
    where: str


def drawn_kills(seed: int, number: int) -> list[Kill]:
    """Kills at random moments on two ranks; only rank 0 always writes."""
    draw = random.Random(seed)  # noqa: S311 - it need not be secret
    batches = sorted(draw.sample(range(1, EPOCHS * BATCHES - 1), number))
    turns = itertools.cycle(draw.sample(WHERE, len(WHERE)))
    return [
        Kill(batch, 0 if where == "writing" else draw.randrange(2), where)
        for batch, where in zip(batches, turns, strict=False)
    ]


def write_kills(folder: Path, kills: list[Kill]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / KILLS).write_text(json.dumps([asdict(kill) for kill in kills]))


def num_killed() -> int:
    return len(list(Path().glob("killed-*")))


class Killer(Callback):
    """Does the next kill."""

    def __init__(self) -> None:
        kills = [Kill(**kill) for kill in json.loads(Path(KILLS).read_text())]
        self._index = num_killed()
        self._kill = [*kills, Kill(10**9, 0, "")][self._index]

    def _is_due(self, trainer: Any, *where: str) -> bool:
        kill = self._kill
        at_step = trainer.global_step >= kill.batch and trainer.global_rank == kill.rank
        return at_step and kill.where in where

    def strike(self) -> NoReturn:
        Path(f"killed-{self._index}").touch()
        if self._kill.where == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._is_due(trainer, "before", "node"):
            self.strike()
        if self._is_due(trainer, "soon"):
            seconds = random.random() / 5  # noqa: S311 - it need not be secret
            threading.Timer(seconds, self.strike).start()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._is_due(trainer, "after"):
            self.strike()

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        if self._is_due(trainer, "saving"):
            self.strike()
        if self._is_due(trainer, "writing"):
            os.fsync = lambda _: self.strike()  # type: ignore[assignment] # never returns


class Losses(Callback):
    """Writes them down, and waits for another node where there is one rank only."""

    def __init__(self, waits_at: int) -> None:
        self._waits_at = waits_at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.total_ranks == 1 and trainer.global_step == self._waits_at:
            Path(ALONE).touch()
            deadline = time.monotonic() + 90
            while not trainer.strategy.stop.was_asked and time.monotonic() < deadline:
                time.sleep(0.05)

    def on_train_batch_end(
        self, trainer: Any, _: Any, outputs: Any, __: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == 0:
            ranks, loss = trainer.strategy.total_ranks, float(outputs["loss"])
            with Path(LOSSES).open("a") as file:
                file.write(f"{ranks} {trainer.current_epoch} {batch_idx} {loss!r}\n")


def lines(folder: Path) -> list[Line]:
    """What was trained, in order; what came once more after a restart, twice."""
    found = []
    for line in (folder / LOSSES).read_text().splitlines():
        ranks, epoch, batch, loss = line.split()
        found.append((int(ranks), int(epoch), int(batch), float(loss)))
    return found


class Views(Dataset[Any]):
    """Two views of each sample, augmented by whatever torch draws at that moment."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> dict[str, Any]:
        made = [images(1, index + 100 * view)[0] + 0.1 * torch.randn(3, 5, 5) for view in range(2)]
        return {"views": made, "weight": float(index % 4), "name": str(index)}


def train(*callbacks: Callback, shards: bool = False, waits_at: int = -1, **trainer: Any) -> None:
    """Train the same as ever."""
    torch.set_default_dtype(torch.float64)
    strict(".*exists and is not empty", "You're resuming from a checkpoint that ended",
           "the checkpoint's plan was made for a different run",
           "AutoResume skips what no training")  # fmt: skip
    torch.manual_seed(3)
    module = lightning_module("Byol-group-2-by hand", "lightning.pytorch", "adamw")
    names = {"student": module.student_names, "teacher": module.teacher_names}
    options = {"costs": "flops", "num_microbatches": 1, "save_distributed_checkpoint": shards}
    strategy = TSPipeStrategy(**names, **options)
    data = DataLoader(Views(), batch_size=2, shuffle=True)
    quiet_trainer(
        strategy=strategy, max_epochs=EPOCHS, callbacks=[*callbacks, Losses(waits_at)], **trainer
    ).fit(module, data, weights_only=False)


def train_at_once() -> None:
    """Never killed."""
    train(devices=2)


def main(waits_at: int = -1) -> None:
    """Killed, and started again."""
    saves = ModelCheckpoint(SAVED, every_n_train_steps=2, save_last=True)
    resumes: Any = partial(train, AutoResume(), Killer(), saves, enable_checkpointing=True)
    # What torchrun has started counts: neither devices nor num_nodes is given.
    resumes(shards=num_killed() % 2 == 1, waits_at=waits_at, devices="auto")
