"""Networks that take more than one tensor: ``forward(input_ids, attention_mask=mask, ...)``.

One tensor travels to the first stage of a pipeline. So the tensors of a call are packed into one
where the batch is, and unpacked by an atom in front of the network; all else about the call (which
arguments are tensors, the values of the others) is part of the network that is cut. A tensor
without a row for each sample, a mask for all of them, say, travels with each one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, in order."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What is known of a tensor argument.

    Attributes:
        dtype: Its type.
        tail: Its shape behind the batch dimension.
        batch: Samples of the batch that was seen.
        is_whole: Whether it has no row for each sample, and the tail is all of its shape.
    """

    dtype: torch.dtype
    tail: tuple[int, ...]
    batch: int = field(default=2, compare=False)
    is_whole: bool = False

    @classmethod
    def of(cls, tensor: Tensor, batch: int | None = None) -> TensorKind:
        """What is known of a tensor, of so many samples if that is known."""
        shape = tuple(tensor.shape)
        if batch is not None and shape[:1] != (batch,):
            return cls(tensor.dtype, shape, is_whole=True)
        return cls(tensor.dtype, shape[1:], next(iter(shape), 2))

    def __repr__(self) -> str:
        return "*"  # in a call that is printed


@dataclass(frozen=True, slots=True)
class Arguments:
    """How a network is called.

    Attributes:
        structure: Pytree structure of ``(args, kwargs)``.
        leaves: Its leaves: of a tensor what is known of it, else the constant itself.
    """

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None = None
    ) -> Arguments:
        """The arguments of a call, for so many samples if that is known."""
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        # Whatever watches the step would see each shape that is read.
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - no public way
            kinds = [
                TensorKind.of(leaf, batch) if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]
        return cls(structure, tuple(kinds))

    def like(self, tensors: Sequence[Tensor]) -> Arguments:
        """The same call with tensors of other shapes."""
        values, batch = iter(tensors), self.rows(dict(enumerate(tensors)))
        leaves = (
            TensorKind.of(next(values), batch) if isinstance(leaf, TensorKind) else leaf
            for leaf in self.leaves
        )
        return replace(self, leaves=tuple(leaves))

    @property
    def tensors(self) -> tuple[TensorKind, ...]:
        """What is known of the tensors, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorKind))

    @property
    def batch(self) -> int:
        """Samples of the batch that was seen."""
        return next(kind.batch for kind in self.tensors if not kind.is_whole)

    def rows(self, tensors: Mapping[int, Tensor]) -> int:
        """Samples of some of the tensors, by their places; 0 if none has a row for each."""
        kinds = self.tensors
        found = (t.shape for place, t in tensors.items() if not kinds[place].is_whole)
        return next((shape[0] for shape in found if shape), 0)

    def bind(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with the given tensors."""
        values = iter(tensors)
        leaves = [next(values) if isinstance(leaf, TensorKind) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor with the bits of all of them, the batch first.

        Args:
            tensors: In order; either all of one shape, or of the shapes that ``self`` tells.

        Returns:
            A single tensor as it is; else int64 ``(batch, tensors, ...)`` if their shapes are one,
            or ``(batch, elements)``.
        """
        if len(tensors) == 1:
            return tensors[0]
        words, rows = [], self.rows(dict(enumerate(tensors)))
        for tensor, kind in zip(tensors, self.tensors, strict=True):
            is_float = tensor.is_floating_point()
            bits = tensor.contiguous().view(_WORDS[tensor.element_size()]) if is_float else tensor
            words.append((bits.expand(rows, *kind.tail) if kind.is_whole else bits).to(torch.int64))
        if self.have_one_shape:
            return torch.stack(words, dim=1)
        return torch.cat([word.reshape(word.shape[0], -1) for word in words], dim=1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """What was packed."""
        kinds = self.tensors
        if len(kinds) == 1:
            return (packed,)
        if self.have_one_shape:
            parts: Sequence[Tensor] = packed.unbind(1)
        else:
            sizes = [torch.Size(kind.tail).numel() for kind in kinds]
            pieces = zip(packed.split(sizes, dim=1), kinds, strict=True)
            parts = [part.reshape(part.shape[0], *kind.tail) for part, kind in pieces]
        own = (part[0] if kind.is_whole else part for part, kind in zip(parts, kinds, strict=True))
        return tuple(
            part.to(_WORDS[kind.dtype.itemsize]).view(kind.dtype)
            if kind.dtype.is_floating_point
            else part.to(kind.dtype)
            for part, kind in zip(own, kinds, strict=True)
        )

    def takes(self, other: Arguments) -> bool:
        """Whether another call is like this one, and its tensors can be packed by these.

        Constants must be the same; lengths of tensors may differ.
        """
        pairs = zip(self.leaves, other.leaves, strict=False)
        if self.structure != other.structure or any(repr(a) != repr(b) for a, b in pairs):
            return False
        if len(self.tensors) == 1:
            return True
        if [kind.dtype for kind in self.tensors] != [kind.dtype for kind in other.tensors]:
            return False
        if self.have_one_shape:
            return other.have_one_shape
        return self.tensors == other.tensors

    @property
    def have_one_shape(self) -> bool:
        """Whether the tensors differ in their types at most, and have a row for each sample."""
        return len({(kind.tail, kind.is_whole) for kind in self.tensors}) == 1

    def __str__(self) -> str:
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"({', '.join(words)})"
