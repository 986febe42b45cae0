"""Activations of a batch as bytes per sample, and placeholders for inputs that were not loaded."""

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

Numbers = NDArray[np.int64]
_MARKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
"""Types with a value that no input has: NaN, which losses show, or an index out of range."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Leaf:
    """One tensor of a sample.

    Attributes:
        shape: Shape without the batch dimension.
        dtype: Type of the layers' output.
        kept: Type in the cache.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.dtype

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
    """

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[Leaf]:
        """The tensors of an entry, whose bytes lie one after the other."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Leaf)]

    @property
    def size(self) -> int:
        """Bytes of an entry."""
        return sum(leaf.size for leaf in self.tensors)

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

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0 or len(value) != num_samples:
            raise ConfigurationError(
                f"frozen layers returned a tensor of shape {list(value.shape)} for {num_samples} "
                "samples: the first dimension of a cached tensor must be the batch dimension"
            )
        kept = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return Leaf(tuple(value.shape[1:]), value.dtype, kept)

    leaves, structure = pytree.tree_flatten(value)
    return Layout(structure, tuple(map(leaf, leaves)))


def join(value: Any, layout: Layout) -> Tensor:
    """The bytes of a batch's entries, shape (samples, bytes), on the device of its tensors."""
    parts = []
    for tensor, leaf in zip(tensors_in(value), layout.tensors, strict=True):
        rows = tensor.to(leaf.kept).contiguous()
        parts.append(rows.view(len(rows), leaf.size // leaf.kept.itemsize).view(torch.uint8))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def split(data: Tensor, layout: Layout, device: torch.device | None = None) -> Any:
    """Inverse of :func:`join`: outputs from entries of shape (samples, bytes)."""
    parts = iter(data.split([leaf.size for leaf in layout.tensors], dim=1))

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        part = next(parts).contiguous()
        if part.storage_offset() % leaf.kept.itemsize:  # of a single sample
            part = part.clone()
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


def rows_of(value: Any, rows: Numbers | Sequence[int] | Tensor) -> Any:
    """Some samples of a batch."""
    chosen = torch.as_tensor(rows)
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor.index_select(0, sent(chosen, tensor.device)), value
    )


def assembled(parts: Sequence[tuple[Numbers, Any]]) -> Any:
    """Assemble a batch from groups of its samples, each with their numbers in the batch."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.from_numpy(np.argsort(np.concatenate([members for members, _ in parts])))

    def merged(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return torch.cat(leaves).index_select(0, sent(order, leaves[0].device))

    return pytree.tree_map(merged, *(value for _, value in parts))


# Inputs that were not loaded


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
    if not all(map(is_loaded, tensors_in(inputs))):
        raise ConfigurationError(
            "a sample's inputs were not loaded, because its activations are cached, but the step "
            "needs them. In WithIds(inputs=...) name only inputs that are read by the frozen "
            "layers alone"
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
