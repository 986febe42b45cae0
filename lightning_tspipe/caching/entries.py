"""Activations of a batch as bytes per sample, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import sent

_ALIGNMENT = 16


@dataclass(frozen=True)
class Leaf:
    """One tensor of a sample.

    Attributes:
        shape: Shape without the batch dimension.
        dtype: Type of the layers' output.
        kept: Type in the cache.
        start: First byte within the entry.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.dtype
    start: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.kept.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} of {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Layout:
    """The format of an entry.

    Attributes:
        structure: Structure of the layers' outputs.
        leaves: Its tensors, in order; other values as they are.
        size: Bytes of an entry.
    """

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    size: int

    def __str__(self) -> str:
        return ", ".join(str(leaf) for leaf in self.leaves)


def layout_of(value: Any, num_samples: int, dtype: torch.dtype | None) -> Layout:
    """The format for storing the outputs of a batch.

    Args:
        value: A tensor, or a structure of tensors and constants.
        num_samples: Samples in the batch.
        dtype: Type in which floating-point numbers are stored; None: their own.

    Raises:
        ConfigurationError: A tensor whose first dimension is not the samples.
    """
    found, structure = pytree.tree_flatten(value)
    leaves: list[Any] = []
    start = 0
    for tensor in found:
        if not isinstance(tensor, Tensor):
            leaves.append(tensor)
            continue
        if tensor.dim() == 0 or len(tensor) != num_samples:
            raise ConfigurationError(
                f"frozen layers returned a tensor of shape {list(tensor.shape)} for {num_samples} "
                "samples: the first dimension of what is cached must be the batch dimension"
            )
        kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        leaf = Leaf(tuple(tensor.shape[1:]), tensor.dtype, kept, start)
        leaves.append(leaf)
        start = -(-(start + leaf.size) // _ALIGNMENT) * _ALIGNMENT
    return Layout(structure, tuple(leaves), start)


def join(value: Any, layout: Layout) -> Tensor:
    """The bytes of a batch's entries, shape (samples, bytes), on the device of its tensors."""
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    leaves = [leaf for leaf in layout.leaves if isinstance(leaf, Leaf)]
    as_bytes = [
        _bytes_of(tensor.to(leaf.kept)) for tensor, leaf in zip(tensors, leaves, strict=True)
    ]
    if len(leaves) == 1 and leaves[0].size == layout.size:
        return as_bytes[0]
    data = as_bytes[0].new_zeros(len(tensors[0]), layout.size)
    for leaf, part in zip(leaves, as_bytes, strict=True):
        data[:, leaf.start : leaf.start + leaf.size] = part
    return data


def split(data: Tensor, layout: Layout, device: torch.device | None = None) -> Any:
    """Inverse of :func:`join`: outputs from entries of shape (samples, bytes)."""

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        part = data[:, leaf.start : leaf.start + leaf.size].contiguous()
        values = part.flatten().view(leaf.kept).view(len(data), *leaf.shape)
        return (values if device is None else sent(values, device)).to(leaf.dtype)

    return pytree.tree_unflatten([tensor(leaf) for leaf in layout.leaves], layout.structure)


def rounded(value: Any, dtype: torch.dtype | None) -> Any:
    """Round floating-point numbers to the precision of a type, as storing and reading does.

    Args:
        value: A tensor, or a structure of tensors and constants.
        dtype: Type in the cache; None: nothing is rounded.
    """
    if dtype is None:
        return value
    return pytree.tree_map_only(
        Tensor,
        lambda tensor: tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor,
        value,
    )


def rows_of(value: Any, rows: NDArray[np.int64] | Sequence[int] | Tensor) -> Any:
    """Some samples of a batch."""
    chosen = torch.as_tensor(rows)
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor.index_select(0, sent(chosen, tensor.device)), value
    )


def device_of(value: Any) -> torch.device | None:
    """Device of the first tensor of a structure; None without one."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return next((tensor.device for tensor in tensors), None)


def _bytes_of(tensor: Tensor) -> Tensor:
    rows = tensor.contiguous()
    return (rows.flatten(1) if rows.dim() > 1 else rows[:, None]).view(torch.uint8)
