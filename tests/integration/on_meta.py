"""Modules that are built in ``configure_model``, and trainings of them."""

from __future__ import annotations

import ctypes
import importlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule

from lightning_tspipe.strategy import strategy as strategy_module
from tests.exactness.modules import CASES, make_epochs
from tests.integration.trainings import (
    RESUMING,
    Epochs,
    Session,
    Trained,
    Training,
    _Steps,
    lightning_module,
)

_MMAP_THRESHOLD = -3  # of malloc.h
_TABLES = ("_modules", "_parameters", "_buffers")


def meta_module(case: str, world: str, optimizer: str) -> Any:
    """A case of the exactness tests whose networks are built in ``configure_model``."""
    known = CASES[case]
    base: type[LightningModule] = importlib.import_module(world).LightningModule

    def start(self: Any) -> None:
        base.__init__(self)

    def configure_model(self: Any) -> None:
        if list(self.children()):
            return
        whole = known.make(**known.kwargs)
        for key, value in vars(whole).items():
            if key in _TABLES:
                getattr(self, key).update(value)
            elif key not in vars(self):
                vars(self)[key] = value

    members = {
        "__init__": start,
        "configure_model": configure_model,
        "optimizer_name": optimizer,
    }
    torch.manual_seed(0)
    return type(f"Late{known.make.__name__}", (_Steps, known.make, base), members)()


def train_on_meta(training: Training, ckpt_path: str | None = None) -> Trained:
    """Fit a module that is built in ``configure_model``."""
    return _train(training, ckpt_path, meta_module)


def train_whole(training: Training, ckpt_path: str | None = None) -> Trained:
    """Fit a module that is built in its constructor."""
    return _train(training, ckpt_path, lightning_module)


def _train(training: Training, ckpt_path: str | None, make: Any) -> Trained:
    """Fit; from a checkpoint of the end of an epoch on, with the batches of the last one."""
    ignored = [RESUMING, "The dirpath has changed"]
    if ckpt_path is not None:  # of another number of devices, which is what is compared
        ignored.append("the checkpoint's plan was made for a different run: devices")
    loader = Epochs(make_epochs(CASES[training.case].build(), training.sizes))
    module = make(training.case, training.world, training.optimizer)
    it = Session(training, module=module, ignored=ignored)
    if ckpt_path is not None:
        for _ in training.sizes[:-1]:
            list(loader)
    return it.fit(loader, ckpt_path=ckpt_path).trained


@contextmanager
def peak_of_own_memory() -> Iterator[list[int]]:
    """By how many bytes this process's memory grows at most; looked at every few milliseconds.

    Pages of files that are only read don't count: the system takes them back as it likes. Nor does
    what was freed: the strategy has the C library keep that, and how much it comes to depends on
    what lies between. Here large blocks go back to the system at once.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    before, peak = _own_memory(), [0]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], _own_memory() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with patch.object(strategy_module, "keep_freed_memory", return_value=True):
            yield peak
    finally:
        ended.set()
        thread.join()


def _own_memory() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    own = re.search(r"RssAnon:\s+(\d+) kB", status), re.search(r"RssShmem:\s+(\d+) kB", status)
    return sum(1024 * int(match[1]) for match in own if match is not None)
