"""Trainings in which something goes wrong, as functions that run on every rank of a job."""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader, Dataset

from tests.exactness.modules import ALL_CASES, Byol, make_epochs
from tests.integration.jobs import Job, run_job
from tests.integration.trainings import Epochs, Training, _Steps, lightning_module, trainer_of

TEXT = "this is the user's own mistake"
SECONDS = 20.0
STEP = 5
EVALUATED = 3
STRUCK = "struck"
SAVED = "saved"


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        how: ``raise``, ``full`` (as a full disk does), ``kill``, ``stall``, ``sigterm``,
            ``sigusr1`` or ``nothing``.
        where: A hook of :class:`Breaking`, ``plan`` (the trace of the first batch), ``step``,
            ``dataset``, ``worker`` (of a loader), ``write`` (within a checkpoint's file) or
            ``sync`` (when a file is to reach the disk).
        rank: Where.
    """

    how: str
    where: str
    rank: int


def strike(fault: Fault) -> None:
    Path(STRUCK).touch()
    if fault.how == "raise":
        raise ValueError(TEXT)
    if fault.how == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault.how == "nothing":
        return
    if fault.how == "stall":
        time.sleep(1000)
    number = "SIGKILL" if fault.how == "kill" else fault.how.upper()
    os.kill(os.getpid(), signal.Signals[number])


class Breaking(lightning.pytorch.Callback, pytorch_lightning.Callback):
    """Strikes in a hook, in or after the step ``STEP``."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._is_done = False

    def _strike(self, where: str, trainer: Any, step: int = STEP) -> None:
        fault = self._fault
        if where != fault.where or trainer.global_rank != fault.rank or self._is_done:
            return
        if trainer.global_step >= step and not trainer.sanity_checking:
            self._is_done = True
            strike(fault)

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._strike("setup", trainer, 0)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._strike("train", trainer)

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.state.fn == "fit":
            self._strike("validate", trainer)
        else:
            self._strike_outside("validate", trainer, *args)

    def on_test_batch_start(self, trainer: Any, *args: Any) -> None:
        self._strike_outside("test", trainer, *args)

    def on_predict_batch_start(self, trainer: Any, *args: Any) -> None:
        self._strike_outside("predict", trainer, *args)

    def _strike_outside(self, where: str, trainer: Any, _: Any, batch: Any, index: int) -> None:
        if index == EVALUATED:
            self._strike(where, trainer, 0)

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self._strike("save", trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self._strike("end", trainer)


class Module(_Steps, Byol, lightning.pytorch.LightningModule):  # type: ignore[misc]
    """At the top of a file, since it travels to workers."""

    optimizer_name = "sgd"

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.student(batch).mean())


def module_of(training: Training) -> Module:
    known = ALL_CASES[training.case]
    assert known.make is Byol
    torch.manual_seed(0)
    module = Module(**known.kwargs)
    if training.change is not None:
        training.change(module)
    return module


class Batches(Dataset[Any]):
    """Batches, one of which may be hard to read."""

    def __init__(self, batches: list[Any], fault: Fault) -> None:
        self._batches, self._fault = batches, fault

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        if index == STEP + 2:
            strike(self._fault)
        return self._batches[index]


@dataclass(frozen=True)
class Broken:
    """A training and its fault.

    Attributes:
        training: What is trained.
        fault: What goes wrong; None: nothing.
        callbacks: Makes further callbacks; module-level.
        ckpt_path: Where to resume from.
        validated: How many batches each replica has to validate.
    """

    training: Training
    fault: Fault | None = None
    callbacks: Callable[[], list[Any]] = field(default=list)
    ckpt_path: str | None = None
    validated: tuple[int, ...] = (3, 3)


def fit(broken: Broken) -> int:
    """Train; the number of steps."""
    training, fault = broken.training, broken.fault
    module = module_of(training)
    epochs = make_epochs(module, training.sizes)
    loader: Any = Epochs(epochs)
    callbacks = [Breaking(fault)] if fault is not None else []
    if fault is not None and fault.where in {"dataset", "worker"}:
        loader = DataLoader(
            Batches(epochs[0], fault), batch_size=None, num_workers=int(fault.where == "worker"),
            multiprocessing_context="fork" if fault.where == "worker" else None,
        )  # fmt: skip
    if fault is not None and fault.where in {"step", "plan"}:
        break_step(module, fault)
    if fault is not None and fault.where == "write":
        break_writing(fault)

    trainer = trainer_of(training, module, *broken.callbacks(), *callbacks)
    if fault is not None and fault.where == "sync":
        break_syncing(fault, trainer)
    validation = Repeated(epochs[0][0]["views"][0], broken.validated, trainer)
    trainer.fit(module, loader, validation, ckpt_path=broken.ckpt_path)
    return int(trainer.global_step)


class Repeated:
    """One batch, as often as the replica has to evaluate it."""

    def __init__(self, batch: Any, numbers: tuple[int, ...], trainer: Any) -> None:
        self._batch, self._numbers, self._trainer = batch, numbers, trainer

    def __len__(self) -> int:
        return self._numbers[getattr(self._trainer.strategy, "replica", 0)]

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self._batch, len(self))


def evaluate(broken: Broken) -> None:
    """Validate, test or predict, which is where the fault is."""
    training, fault = broken.training, broken.fault
    assert fault is not None
    module = module_of(training)

    def step(batch: Any, batch_idx: int) -> Any:
        return module.student(batch).mean()

    for name in ("validation_step", "test_step", "predict_step"):
        vars(module)[name] = getattr(module, "evaluated", step)
    trainer = trainer_of(training, module, Breaking(fault))
    batch = make_epochs(module, ((5,),))[0][0]["views"][0]
    getattr(trainer, fault.where)(module, Repeated(batch, broken.validated, trainer))


def break_step(module: Any, fault: Fault) -> None:
    step = module.training_step

    def broken(batch: Any, batch_idx: int) -> Any:
        # As a plain number: else it would strike where the step is looked at for the question.
        due = int(batch_idx) == STEP or (fault.where == "plan" and batch_idx == 0)
        due = due and module.trainer.global_rank == fault.rank
        if due and fault.rank != 0:  # those without the loss run the first part of the step only
            strike(fault)
        loss = step(batch, batch_idx)
        if due:
            strike(fault)
        return loss

    module.training_step = broken


def break_writing(fault: Fault) -> None:
    """The third file ends in its middle."""
    save, count = torch.save, [0]

    def half(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        count[0] += str(getattr(file, "name", "")).endswith(".part")
        if count[0] < 3:
            save(value, file, *args, **kwargs)
            return
        file.write(b"half a file")
        file.flush()
        strike(fault)

    torch.save = half  # type: ignore[assignment] # on the rank that writes; the others never do


def break_syncing(fault: Fault, trainer: Any) -> None:
    """The first file after the step ``STEP`` does not reach the disk, nor do those after it."""
    sync = os.fsync

    def broken(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").resolve()
        named = re.search(r"step=(\d+)", path.name)  # a thread may be behind the training
        step = int(named[1]) if named is not None else trainer.global_step
        if step >= STEP and trainer.global_rank == fault.rank and not path.is_dir():
            strike(fault)
        sync(file)

    os.fsync = broken  # type: ignore[assignment] # called with a number


def saving() -> list[Any]:
    """One file that is written again and again, and one for failures."""
    return [
        ModelCheckpoint(SAVED, "same", every_n_train_steps=2, enable_version_counter=False,
                        save_on_exception=True, save_last="link"),
        OnExceptionCheckpoint(SAVED, "exception"),
    ]  # fmt: skip


BYOL = Training(
    "Byol-group-2-by hand", "instance", {"num_microbatches": 2}, sizes=((5,) * 40,),
    trainer={"val_check_interval": 3, "enable_checkpointing": True},
)  # fmt: skip


def over(training: Training, num_ranks: int) -> Training:
    """On so many ranks; 4 are two replicas."""
    options = training.options if num_ranks < 4 else {**training.options, "num_stages": 2}
    return replace(training, num_ranks=num_ranks, options=options)


def run_broken(
    broken: Broken,
    folder: Path,
    *,
    within: float = SECONDS,
    function: Callable[[Broken], Any] = fit,
) -> Job:
    """Run it, and check what holds for every fault.

    Args:
        broken: The training.
        folder: Where it runs.
        within: All processes end in so many seconds after the fault.
        function: Runs it, on each rank.
    """
    job = run_job(function, broken, num_ranks=broken.training.num_ranks, folder=folder)
    ended = time.time()
    assert (folder / STRUCK).exists(), job.output
    struck = (folder / STRUCK).stat().st_mtime
    assert ended - struck < within, job.output
    assert all(rank.exit_code not in {0, None} for rank in job.ranks), job.output
    return job


def loads(path: Path) -> int:
    """Whether a checkpoint is whole; its step."""
    checkpoint = torch.load(path, weights_only=False)
    module = lightning_module("Byol-group-2-by hand", "lightning.pytorch", "sgd")
    module.load_state_dict(checkpoint["state_dict"])
    assert checkpoint["optimizer_states"][0]["state"]
    return int(checkpoint["global_step"])


PHASES = {
    "setup": "the start-up", "plan": "training step 1, which captures and plans",
    "train": "training step 6", "step": r"training step \d+",
    "validate": "batch 0 of the validation",
    "save": "saving a checkpoint", "write": "saving a checkpoint", "end": "the end of the training",
    "worker": r"training step \d+",
}  # fmt: skip
"""What a rank says that it was doing when the fault came; regular expressions."""


def named_once(job: Job, rank: int, phase: str) -> bool:
    """Whether one line tells that a rank was killed, and where."""
    who = rf"rank {rank} \(pid \d+ on \S+\)"
    told = rf"The job ends, because {who} (was killed by SIGKILL|ended) in {phase}"
    others = job.output.count("The job ends, because") - 1
    return others == 0 and re.search(told, job.output) is not None


def num_tracebacks(job: Job) -> int:
    """How many ranks explain themselves; a loader's worker is quoted by its rank.

    An exception that came while another was handled is one explanation, of two parts.
    """
    parts = len(re.findall(r"(?<!Original )Traceback \(most recent call last\)", job.output))
    chained = r"During handling of the above exception|the direct cause of the following exception"
    return parts - len(re.findall(chained, job.output))
