"""Networks that take more than one tensor: ``forward(input_ids, attention_mask=mask, ...)``.

The tensors of a call travel to the first stage of a pipeline; all else about the call (which
arguments are tensors, the values of the others) is part of the network that is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, in order."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What is known of a tensor argument.

    Attributes:
        dtype: Its type.
        shape: Its sizes in the call that was seen; the first one is the number of samples.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

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
            kinds = [
                TensorKind(leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
        return cls(structure, tuple(kinds))

    @property
    def tensors(self) -> tuple[TensorKind, ...]:
        """What is known of the tensors, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorKind))

    @property
    def batch(self) -> int:
        """Samples of the batch that was seen."""
        return self.tensors[0].shape[0]

    def bind(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with the given tensors."""
        values = iter(tensors)
        leaves = [next(values) if isinstance(leaf, TensorKind) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

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
