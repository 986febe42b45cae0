"""Measured times of reading and of computing activations: is caching worth it?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.caching.cache import ActivationCache, Segment
from lightning_tspipe.caching.entries import layout_of
from lightning_tspipe.caching.keys import Boundary
from lightning_tspipe.errors import ConfigurationError


@dataclass(frozen=True)
class Worth:
    """Measured seconds per sample.

    Attributes:
        compute: Running the frozen layers on inputs.
        memory: Reading their outputs from memory.
        disk: Reading them from disk, with a cold page cache; infinite if not measured.
        load: Loading and decoding the inputs, which a hit saves; 0 if they are loaded anyway.
        num_bytes: Bytes of an entry.
    """

    compute: float
    memory: float
    disk: float = math.inf
    load: float = 0.0
    num_bytes: int = 0

    @property
    def by_memory(self) -> bool:
        """Whether reading from memory is faster than computing."""
        return self.memory < self.compute + self.load

    @property
    def by_disk(self) -> bool:
        """Whether reading from disk is faster than computing."""
        return self.disk < self.compute + self.load

    def __str__(self) -> str:
        read = f"{1e3 * self.memory:.3f} ms from memory"
        if math.isfinite(self.disk):
            read += f", {1e3 * self.disk:.3f} ms from disk"
        load = f" (and {1e3 * self.load:.3f} ms to load the input)" if self.load else ""
        return (
            f"per sample {1e3 * self.compute:.3f} ms to compute{load}, {read}; "
            f"{self.num_bytes / 1e6:.3f} MB"
        )


def measure(function: Callable[[Any], Any], inputs: Any, *, repeats: int = 3, **how: Any) -> Worth:
    """Compute a batch's activations and read them, several times each; the shortest time counts.

    Args:
        function: The frozen layers.
        inputs: Inputs of a batch; a structure of tensors.
        repeats: Runs of each kind, after one that is not counted.
        how: Other arguments of :func:`measure_reading`.
    """
    num_samples = next(len(t) for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))
    with torch.no_grad():
        compute, value = _shortest(lambda: function(inputs), repeats)
    worth = measure_reading(value, num_samples, repeats=repeats, **how)
    return replace(worth, compute=compute / num_samples)


def measure_reading(  # noqa: PLR0913 - what, and how
    value: Any,
    num_samples: int,
    *,
    dtype: torch.dtype | None = None,
    disk: bool = False,
    folder: str | PathLike[str] | None = None,
    repeats: int = 3,
) -> Worth:
    """Measure how long reading a batch takes; the time of computing it is 0 in the result.

    Args:
        value: Outputs of the frozen layers.
        num_samples: Samples in the batch.
        dtype: Type in which activations would be stored.
        disk: Whether to measure the disk too.
        folder: A folder on the file system for the disk's part.
        repeats: Runs of each kind, after one that is not counted.
    """
    layout = layout_of(value, num_samples, dtype)
    budget = 2 * num_samples * (layout.size + 64)

    def reading(cache: ActivationCache, *, cold: bool) -> float:
        segments = [Segment(Boundary("measured", dtype=dtype), lambda _: value)]
        ids = list(range(num_samples))
        try:
            cache.outputs(ids, value, segments)
            before = cache.store.forget if cold else None
            return _shortest(lambda: cache.outputs(ids, value, segments), repeats, before)[0]
        finally:
            cache.close()

    from_memory = reading(ActivationCache(num_samples, memory=budget), cold=False) / num_samples
    from_disk = math.inf
    if disk:
        with suppress(ConfigurationError):  # it has filled up since the start: never worth it
            lying = ActivationCache(num_samples, disk=budget, folder=folder)
            from_disk = reading(lying, cold=True) / num_samples
    return Worth(0.0, from_memory, from_disk, num_bytes=layout.size)


def _shortest(
    work: Callable[[], Any], repeats: int, before: Callable[[], None] | None = None
) -> tuple[float, Any]:
    """The time of the fastest run, in seconds, and what it returned."""
    seconds, value = math.inf, work()
    for _ in range(repeats):
        if before is not None:
            before()
        started = time.perf_counter()
        value = work()
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
                break
        seconds = min(seconds, time.perf_counter() - started)
    return seconds, value
