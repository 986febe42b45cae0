"""Batches on their way between devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class CopyStream:
    """Copies batches from the host to a GPU beside what the GPU computes.

    What is launched behind a copy waits for it; the copy waits for nothing, and so the host, which
    is ahead of its GPU, is not held either where a batch lies in pageable memory.

    Args:
        device: Where the batches go; on a CPU they are copied as usual.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, copy: Callable[[Any], Any], batch: Any) -> Any:
        """Copy a batch.

        Args:
            copy: Gives the batch on the device; it does nothing but copy.
            batch: The batch. If parts of it are on the device, what makes them is waited for.
        """
        if self._stream is None or any(t.device.type == "cuda" for t in _tensors(batch)):
            return copy(batch)
        computing = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            copied = copy(batch)
        computing.wait_stream(self._stream)
        for tensor in _tensors(copied):
            if tensor.device.type == "cuda":  # not freed for the next copy while it is in use
                tensor.record_stream(computing)
        return copied


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)


def on_cpu(batch: Any) -> Any:
    """A batch with its tensors in host memory."""
    return to_device(batch, torch.device("cpu"))
