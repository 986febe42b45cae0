"""Faults from within: a rank that comes to the drawn moment does to itself what was drawn."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from tests.faults.lab.drawing import SLOW_SECONDS, Fault
from tests.faults.lab.training import SAVED, Task, run

STRUCK = "struck"
ROOT = "root"
BALLAST = "ballast"
TEXT = "a mistake of the user's own"
PACKAGE = "lightning_tspipe.strategy"
PATCHED: dict[str, tuple[str, ...]] = {
    "connect": ("lightning.run:Run.join",),
    "capture": ("setup.block_costs:infer_shapes",),  # in other modes, the module's own step
    "in step": ("training.relaying:RelayTraining._training_step",),
    "planning": (
        "training.deciding:Decider.agree",
        "training.fanout:HeadPlanner.plan",
        "setup.block_costs:BlockPlanner.plan",
    ),
    "repack": ("lightning.run:Run.reconnect",),
}
"""Functions that every rank calls at these moments, and no hook of Lightning's tells of."""
START = "lightning.run:_START"
"""How long ranks may differ in their starts."""
_wall_clock = time.time


MET = "met-"
"""A rank leaves such a file when it has met the others."""


def pid_file(rank: int) -> Path:
    """Where a rank leaves its number."""
    return Path(f"pid-{rank}")


class Striker:
    """Does it once in a job, on the drawn rank.

    Args:
        fault: What goes wrong.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self.rank: int | None = None
        self.is_old_enough = False

    def reach(self, moment: str, place: str = "", rank: int | None = None) -> None:
        """Strike, if it is time."""
        fault = self._fault
        rank = self.rank if rank is None else rank
        if (moment, place, rank) == (fault.moment, fault.place, fault.rank):
            self.strike()

    def strike(self) -> None:
        """Say when, and do it."""
        try:
            descriptor = os.open(STRUCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        os.write(descriptor, f"{_wall_clock()} {os.getpid()}".encode())
        os.close(descriptor)
        kind = self._fault.kind
        if kind.startswith("SIG"):
            parent = self._fault.target == "parent"
            os.kill(int(Path(ROOT).read_text()) if parent else os.getpid(), signal.Signals[kind])
        elif kind == "two jobs":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "exception":
            raise ValueError(TEXT)
        elif kind == "slow rank":
            time.sleep(SLOW_SECONDS)
        elif kind == "clock jump":
            _jump(self._fault.amount)
        else:
            fill(Path(SAVED))


def fill(folder: Path) -> None:
    """Take all the space of a disk."""
    descriptor = os.open(folder / BALLAST, os.O_WRONLY | os.O_CREAT)
    for size in (2**16, 2**10, 1):
        try:
            while True:
                os.write(descriptor, bytes(size))
        except OSError:
            continue
    os.close(descriptor)


def _jump(seconds: float) -> None:
    _replace(time, "time", lambda: _wall_clock() + seconds)
    _replace(time, "time_ns", lambda: int((_wall_clock() + seconds) * 1e9))


class Hooks(Callback):
    """The moments that Lightning tells of.

    Args:
        fault: What goes wrong.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._num_batches = 0
        self._is_captured = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        striker.rank = trainer.global_rank
        Path(f"{MET}{trainer.global_rank}").touch()
        pid_file(trainer.global_rank).write_text(str(os.getpid()))
        striker.reach("start-up", "setup")
        self._wrap_step(pl_module)

    def _wrap_step(self, module: Any) -> None:
        if type(module).__name__ == "Blocks":  # its step is the package's own
            return
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            if not self._is_captured:
                self._is_captured = True
                striker.reach("capture")
            elif self._is_due:
                striker.reach("step", "in step")
            return step(batch, batch_idx)

        vars(module)["training_step"] = training_step

    @property
    def _is_due(self) -> bool:
        return self._num_batches >= self._fault.step

    def on_train_batch_start(self, *_: Any) -> None:
        striker.is_old_enough = self._is_due
        if self._is_due:
            striker.reach("step", "batch start")

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self._is_due:
            striker.reach("step", "backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self._num_batches += 1
        if self._is_due:
            striker.reach("step", "batch end")

    def on_validation_batch_start(self, *_: Any) -> None:
        if self._is_due:
            striker.reach("validation")

    def on_save_checkpoint(self, *_: Any) -> None:
        if self._is_due:
            striker.reach("saving", "hook")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch >= self._fault.step % 3:
            striker.reach("epoch end")

    def on_train_end(self, *_: Any) -> None:
        striker.reach("train end")

    def teardown(self, *_: Any, **__: Any) -> None:
        striker.reach("teardown")


def _before(moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if moment == "in step":
            if striker.is_old_enough:
                striker.reach("step", moment)
        else:
            striker.reach(moment)
        return function(*args, **kwargs)

    @wraps(function)
    def connects(run: Any, *args: Any) -> None:
        striker.rank = run.local_rank  # of one machine
        pid_file(striker.rank).write_text(str(os.getpid()))
        striker.reach("start-up", "connect")
        function(run, *args)
        striker.reach("start-up", "connected")

    return connects if moment == "connect" else wrapped


def owner_of(place: str) -> tuple[Any, str]:
    """Where a function of the package is kept, and its name there."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(f"{PACKAGE}.{module}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


_undo: list[tuple[Any, str, Any]] = []
"""What was patched in the parent that this process was forked from."""


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def patch(task: Task) -> None:
    """Have the package tell of moments that no hook does."""
    for moment, places in PATCHED.items():
        for place in places:
            owner, name = owner_of(place)
            _replace(owner, name, _before(moment, getattr(owner, name)))
    fault = task.fault
    if fault is not None and fault.kind == "SIGSTOP" and fault.moment == "start-up":
        # Ranks may differ in their starts by the time of imports; here nothing is imported.
        owner, name = owner_of(START)
        assert timedelta(seconds=task.timeout) < getattr(owner, name)
        _replace(owner, name, timedelta(seconds=task.timeout))
    if fault is not None and fault.place in {"sync", "rename"}:
        _patch_files()


def unpatch() -> None:
    """As it is in a new interpreter."""
    while _undo:
        setattr(*_undo.pop())


def _patch_files() -> None:
    def is_ours(path: Any) -> bool:
        return striker.is_old_enough and SAVED in Path(path).parts

    sync = os.fsync

    def fsync(file: Any) -> None:
        if is_ours(Path(f"/proc/self/fd/{file}").resolve()):
            striker.reach("saving", "sync")
        sync(file)

    def before(function: Any) -> Any:
        def wrapped(source: Any, target: Any, **kwargs: Any) -> None:
            if is_ours(Path(target).absolute()):
                striker.reach("saving", "rename")
            function(source, target, **kwargs)

        return wrapped

    _replace(os, "fsync", fsync)
    for name in ("replace", "rename"):
        _replace(os, name, before(getattr(os, name)))


striker: Striker
_task: Task


def arm() -> None:
    """In every process that runs the script, as a script or as a worker's main module."""
    global striker, _task  # noqa: PLW0603 - one job in a process
    unpatch()
    torch.set_default_dtype(torch.float64)
    _task = Task.read(Path("task.json"))
    nothing = Fault("nothing", "never")
    striker = Striker(_task.fault or nothing)
    if _task.fault is not None:
        patch(_task)


def main() -> None:
    """The script."""
    rank = next((os.environ[n] for n in ("SLURM_PROCID", "LOCAL_RANK") if n in os.environ), None)
    if rank is not None or _task.launcher == "popen":
        pid_file(int(rank or 0)).write_text(str(os.getpid()))
        striker.reach("start-up", "script", int(rank or 0))
    run(_task, *([Hooks(_task.fault)] if _task.fault is not None else []))


SCRIPT = """from tests.faults.lab import striking

striking.arm()
if __name__ == "__main__":
    striking.main()
"""
