"""Structures of tensors: what torch's pytrees don't know by themselves."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import TypeVar

from torch.utils import _pytree as pytree

T = TypeVar("T")


def registered(value: T) -> T:
    """A structure, as it is; pytrees know the dataclasses in it from now on, in this process."""
    kinds = {type(leaf) for leaf in pytree.tree_leaves(value) if is_dataclass(leaf)} - {type}
    for kind in kinds:
        pytree.register_dataclass(kind)
    return registered(value) if kinds else value  # and what lies in those
