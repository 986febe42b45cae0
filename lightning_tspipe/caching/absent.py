"""What stands for inputs that were not loaded, and how it is noticed when someone reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError

_MARKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
"""Types that have a value which no input has: losses of it are NaN, tokens are out of range."""


def absent(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Stands for an input that was not loaded; takes no memory of that size.

    >>> absent((2, 2), torch.float32)
    tensor([[nan, nan],
            [nan, nan]])
    """
    return _mark(dtype).expand(tuple(shape))


def check_loaded(inputs: Any) -> None:
    """Refuse to compute with inputs that a dataset left out.

    Raises:
        ConfigurationError: One of them is absent.
    """
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.dtype in _MARKED:
            first = leaf.flatten(1)[:, 0] if leaf.dim() > 1 else leaf
            gone = first.isnan() if first.is_floating_point() else first == _mark(first.dtype)
            if bool(gone.any()):
                raise ConfigurationError(
                    "the inputs of a sample were not loaded, since its activations are cached, but "
                    "now they are needed. In WithIds(inputs=...) name only what nothing but the "
                    "frozen layers reads"
                )


def _mark(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.full((), float("nan"), dtype=dtype)
    value = torch.iinfo(dtype).min if dtype in _MARKED else 0
    return torch.full((), value, dtype=dtype)
