"""Networks that take more than one tensor: ``forward(input_ids, attention_mask=mask, ...)``.

The tensors of a call travel to the first stage of a pipeline; all else about the call (which
arguments are tensors, the values of the others) is part of the network that is cut. A tensor
without a row for each sample, a mask for all of them, say, travels with each one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in the arguments of a call, in a result or another structure, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What is known of a tensor argument.

    Attributes:
        dtype: Its type.
        shape: Its sizes in the call that was seen.
        is_whole: Whether it has no row for each sample; else the first size is their number.
        is_bound: Whether it is made of a batch nevertheless, and belongs to all of its samples.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_whole: bool = False
    is_bound: bool = False

    @classmethod
    def of(cls, tensor: Tensor, batch: int | None = None) -> TensorKind:
        """What is known of a tensor, of so many samples if that is known."""
        shape = tuple(tensor.shape)
        return cls(tensor.dtype, shape, batch is not None and shape[:1] != (batch,))

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

    @property
    def tensors(self) -> tuple[TensorKind, ...]:
        """What is known of the tensors, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorKind))

    @property
    def batch(self) -> int:
        """Samples of the batch that was seen."""
        return next(kind.shape[0] for kind in self.tensors if not kind.is_whole)

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

    def spread(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors, each with a row for each sample: as they travel."""
        rows = self.rows(dict(enumerate(tensors)))
        return tuple(
            tensor.expand(rows, *tensor.shape) if kind.is_whole else tensor
            for tensor, kind in zip(tensors, self.tensors, strict=True)
        )

    def gathered(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What was spread."""
        pairs = zip(tensors, self.tensors, strict=True)
        return tuple(tensor[0] if kind.is_whole else tensor for tensor, kind in pairs)

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """The tensors of another call, if it is like this one: all else is the same; else None."""
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if structure != self.structure:
            return None
        tensors = []
        for leaf, known in zip(leaves, self.leaves, strict=True):
            if isinstance(leaf, Tensor) and isinstance(known, TensorKind):
                tensors.append(leaf)
            elif leaf is not known and repr(leaf) != repr(known):
                return None
        return tensors

    def __str__(self) -> str:
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"({', '.join(words)})"
