"""Batches on their way between devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)


def on_cpu(batch: Any) -> Any:
    """A batch with its tensors in host memory."""
    return to_device(batch, torch.device("cpu"))
