"""Trainings whose steps are watched for reads: where the host wants to know what a device computed.

On a GPU each of them holds the host until the device has done all that it was given, and the device
then waits for the host. On CPUs nothing is held, so the reads themselves are counted.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from tests.device import DEVICE, HOST, SHARED
from tests.integration.everywhere import Mode, go

READS: frozenset[Any] = frozenset(
    {
        Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.nonzero, Tensor.equal,
        Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__contains__,
        Tensor.__array__, Tensor.__repr__, Tensor.masked_select, Tensor.unique, Tensor.is_nonzero,
        Tensor.allclose, torch.equal, torch.allclose, torch.nonzero, torch.masked_select,
        torch.unique, torch.is_nonzero, torch.bincount, Tensor.bincount,
    }
)  # fmt: skip


class Reads(TorchFunctionMode):
    """Counts reads in code of the package, by file and line.

    Not what torch's optimizers read, whose step counters are on the host, and not what is looked at
    late, which waits for nothing.

    Args:
        found: Where they are counted.
    """

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # On a GPU, what the host has already is no question to it.
        is_there = SHARED in os.environ and args and getattr(args[0], "device", DEVICE) == HOST
        if not is_there and (func in READS or (func is Tensor.__getitem__ and _has_mask(args[1]))):
            self._note(func)
        return func(*args, **kwargs)

    def _note(self, func: Any) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and "/torch/" in frame.f_code.co_filename:
            if "/torch/optim/" in frame.f_code.co_filename:
                return
            frame = frame.f_back
        if frame is None or "/lightning_tspipe/" not in frame.f_code.co_filename:
            return
        file = frame.f_code.co_filename.rpartition("/lightning_tspipe/")[2]
        if file == "late.py":
            return
        self._found[f"{file}:{frame.f_lineno} {func.__name__}"] += 1


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, Tensor) and p.dtype == torch.bool and p.dim() for p in parts)


class Counting(Callback):
    """Counts in steady steps: in each epoch those behind the first few, up to the one before last.

    Of the first ones some prepare what comes, and behind an epoch's last one is its end.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.num_batches = 0
        self._reads: Reads | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any,
                           batch_idx: int) -> None:  # fmt: skip
        self.num_batches += self._reads is not None
        if batch_idx == 4:
            self._reads = Reads(self.found)
            self._reads.__enter__()  # type: ignore[no-untyped-call]
        elif batch_idx == trainer.num_training_batches - 2 and self._reads is not None:
            self._reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._reads = None


def reads_of(mode: Callable[[], Mode]) -> tuple[dict[str, int], int]:
    """What is read in steady steps on this rank, by file and line, and in how many steps."""
    made, counting = mode(), Counting()
    num_samples = 10 * made.batch_size * (made.num_ranks if made.num_ranks == 4 else 1)
    callbacks = made.callbacks
    go(replace(made, num_samples=num_samples, callbacks=lambda: [*callbacks(), counting]))
    return dict(counting.found), counting.num_batches
