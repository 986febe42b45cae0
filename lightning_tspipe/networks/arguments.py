"""Networks that take more than one tensor: ``forward(input_ids, attention_mask=mask, ...)``.

One tensor travels to the first stage of a pipeline. So the tensors of a call are packed into one
where the batch is, and unpacked by an atom in front of the network; all else about the call (which
arguments are tensors, the values of the others) is part of the network that is cut.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
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
    """

    dtype: torch.dtype
    tail: tuple[int, ...]
    batch: int = field(default=2, compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        """What is known of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape[1:]), *tensor.shape[:1])

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
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of a call."""
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        # Whatever watches the step would see each shape that is read.
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - no public way
            kinds = [TensorKind.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(structure, tuple(kinds))

    def like(self, tensors: Sequence[Tensor]) -> Arguments:
        """The same call with tensors of other shapes."""
        values = iter(tensors)
        leaves = (
            TensorKind.of(next(values)) if isinstance(leaf, TensorKind) else leaf
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
        return self.tensors[0].batch

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
        words = []
        for tensor in tensors:
            is_float = tensor.is_floating_point()
            bits = tensor.contiguous().view(_WORDS[tensor.element_size()]) if is_float else tensor
            words.append(bits.to(torch.int64))
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
            tails = _tails(tuple(kind.tail for kind in kinds), packed.shape[1])
            pieces = zip(packed.split([*map(math.prod, tails)], dim=1), tails, strict=True)
            parts = [part.reshape(part.shape[0], *tail) for part, tail in pieces]
        return tuple(
            part.to(_WORDS[kind.dtype.itemsize]).view(kind.dtype)
            if kind.dtype.is_floating_point
            else part.to(kind.dtype)
            for part, kind in zip(parts, kinds, strict=True)
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
        own, others = (tuple(kind.tail for kind in each.tensors) for each in (self, other))
        return _tails(own, sum(map(math.prod, others))) == others

    @property
    def have_one_shape(self) -> bool:
        """Whether the tensors differ in their types at most."""
        return len({kind.tail for kind in self.tensors}) == 1

    def __str__(self) -> str:
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"({', '.join(words)})"


@cache
def _tails(seen: tuple[tuple[int, ...], ...], num_elements: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of samples that take a number of elements: as seen, but for one length.

    As of sentences with a label each. Whoever packs sees whether these are the shapes.
    """

    def with_length(length: int, other: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(other if n == length else n for n in tail) for tail in seen)

    for length in dict.fromkeys(size for tail in seen for size in tail):

        def taken(other: int, length: int = length) -> int:
            return sum(map(math.prod, with_length(length, other)))

        other = bisect_left(range(num_elements), num_elements, key=taken)
        if taken(other) == num_elements:
            return with_length(length, other)
    return seen
