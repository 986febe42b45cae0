"""Tensors of a worker's own, where torch lets all workers share those of their parent.

A parameter that two ranks update would be updated twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def own_memory(owners: Iterable[Any]) -> None:
    """Copy what came from the parent: tensors of modules, and of objects such as callbacks.

    Of an object, the tensors and modules that its attributes are; data sets keep sharing theirs.
    """
    for owner in owners:
        if isinstance(owner, nn.Module):
            _own(owner)
        elif hasattr(owner, "state_dict"):
            _own_attributes(owner)
            for value in vars(owner).values():
                if isinstance(value, nn.Module):
                    _own(value)


def _own(module: nn.Module) -> None:
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        tensor.data = tensor.data.clone()
    for child in module.modules():
        _own_attributes(child)


def _own_attributes(owner: Any) -> None:
    for name, value in vars(owner).items():
        if isinstance(value, Tensor) and value.is_shared():
            vars(owner)[name] = value.clone().requires_grad_(value.requires_grad)
