"""Copy batches between devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override


def copied_beside(device: torch.device) -> AbstractContextManager[Any]:
    """Copies from the host to a GPU, while inside, run beside what the GPU computes.

    What is launched behind a copy waits for it; the copy waits for nothing, and so the host, which
    is ahead of its GPU, is not held either where a batch lies in pageable memory.

    Args:
        device: Where the batches go; on a CPU they are copied as usual.
    """
    return nullcontext() if device.type != "cuda" else _Copying(_stream(device))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Copying(TorchFunctionMode):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._stream = stream

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        moves = func is Tensor.to or func is Tensor.cuda
        if not moves or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        computing = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            result = func(*args, **(kwargs or {}))
        if result.device.type == "cuda":
            computing.wait_stream(self._stream)
            result.record_stream(computing)  # or its memory would be free for the next copy
        return result


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)


def on_cpu(batch: Any) -> Any:
    """A batch with its tensors in host memory."""
    return to_device(batch, torch.device("cpu"))
