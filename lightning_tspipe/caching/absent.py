"""Placeholders for inputs that were not loaded, and checks that nobody computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError

_MARKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
"""Types with a value that no input has: NaN, which losses show, or an index out of range."""


def absent(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A placeholder for an input that was not loaded; takes no memory of that size.

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
    if not all(is_loaded(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)):
        raise ConfigurationError(
            "the inputs of a sample were not loaded, since its activations are cached, but now "
            "they are needed. In WithIds(inputs=...) name only inputs that nothing but the frozen "
            "layers reads"
        )


def is_loaded(batch: Tensor) -> bool:
    """Whether a batch of inputs holds no sample that was left out.

    >>> is_loaded(torch.ones(2, 3)), is_loaded(absent((2, 3), torch.int64))
    (True, False)
    """
    return not bool(absent_rows(batch).any())


def absent_rows(batch: Tensor) -> Tensor:
    """Whether each sample of a batch of inputs was left out, shape (samples,).

    >>> absent_rows(torch.tensor([[1.0, 2.0], [float("nan"), 0.0]]))
    tensor([False,  True])
    """
    if not batch.numel() or batch.dtype not in _MARKED:
        return torch.zeros(len(batch), dtype=torch.bool, device=batch.device)
    first = batch.flatten(1)[:, 0] if batch.dim() > 1 else batch
    return first.isnan() if first.is_floating_point() else first == _mark(first.dtype)


def _mark(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.full((), float("nan"), dtype=dtype)
    value = torch.iinfo(dtype).min if dtype in _MARKED else 0
    return torch.full((), value, dtype=dtype)
