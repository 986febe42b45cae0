"""Computing with a batch that has no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.functions import MOVES, name_of, writes_in_place


class MetaWins(TorchFunctionMode):
    """What is computed from a meta tensor is one, whatever else it is computed from.

    Steps normalise their views with constants, add noise to them, move them to a device. On a rank
    without data, where views are meta tensors, such operations would fail. What is written in place
    is left alone: parameters of this rank must really change, those of others are meta tensors.

    Attributes:
        is_on: Whether it does anything; off for a while where real parameters are worked on.

    Example:
        >>> with MetaWins():
        ...     (torch.ones(2, device="meta").to("cpu") + torch.ones(2)).device
        device(type='meta')
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_on = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_on:
            return func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            if func in MOVES:
                return _moved(func, args, kwargs)
            target_is_meta = isinstance(args[0], Tensor) and args[0].is_meta if args else False
            if writes_in_place(name_of(func)) and not target_is_meta:
                return func(*args, **kwargs)
            leaves = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, structure)
        return func(*args, **kwargs)


def _moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A move takes a new type on, but no device."""
    tensor: Tensor = args[0]
    if func is not Tensor.to:
        return tensor
    wanted = [*args[1:], *kwargs.values()]
    like = [leaf.dtype for leaf in wanted if isinstance(leaf, Tensor)]
    dtypes = [leaf for leaf in wanted if isinstance(leaf, torch.dtype)]
    return tensor.to("meta", dtype=(dtypes or like or [tensor.dtype])[0])
