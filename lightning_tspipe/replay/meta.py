"""Steps on batches without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.provenance import MOVES, name_of
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.tape import memory_of

_DEVICE: Any = Tensor.device
_COPY: Any = Tensor.__deepcopy__


class MetaWins(TorchFunctionMode):
    """What is computed from a meta tensor is one, whatever else it is computed from.

    Steps normalise their views with constants, add noise to them, move them to a device, or make
    masks where they are. On a rank without data, where views are meta tensors, such operations
    would fail, so these say that they are on its device. What is written in place is left alone:
    parameters of this rank must really change, those of others are meta tensors.

    Args:
        device: Where this rank computes.
        weights: Those of pipelined networks, which must not be changed by what has no values:
            torch would leave them as they are, without a word.

    Raises:
        CaptureError: They would be.

    Attributes:
        is_on: Whether it does anything; off for a while where real parameters are worked on.

    Example:
        >>> with MetaWins(torch.device("cpu")):
        ...     made = torch.ones(2, device="meta").to("cpu") + torch.ones(2)
        ...     made.device
        device(type='cpu')
        >>> made.device
        device(type='meta')
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._device = device
        self._weights = weights
        self.is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _COPY:  # given beside all that has been copied before: no mix
            return func(*args, **kwargs)
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        if self.is_on and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            if func == _DEVICE.__get__:
                return self._device
            if func in MOVES:
                return _moved(func, args, kwargs)
            target_is_meta = isinstance(args[0], Tensor) and args[0].is_meta if args else False
            is_in_place = changes_first(func)
            if is_in_place and not target_is_meta:
                self._check(args[0])
            if target_is_meta or not is_in_place:
                args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **kwargs)

    def _check(self, target: Any) -> None:
        if isinstance(target, Tensor) and memory_of(target) in {
            memory_of(each) for each in self._weights if not each.is_meta
        }:
            raise CaptureError(
                f"the step changes a weight of a pipelined network at {current_line()} by what has "
                "no values on its rank: the batch, or a weight that lies on another rank. Of a "
                "pair that is averaged both must lie on one rank: let the step call both networks "
                "(TSPipeStrategy(student=..., teacher=...) names them), or use "
                "lightning_tspipe.MomentumEMA"
            )


def changes_first(func: Callable[..., Any]) -> bool:
    """Whether a function will change its first argument."""
    last = name_of(func).rpartition(".")[2]
    if last.endswith("__"):
        return last == "__setitem__" or last.startswith("__i") or last == "__set__"
    return last.endswith("_")


def _moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A move takes a new type on, but no device."""
    tensor: Tensor = args[0]
    if func is not Tensor.to:
        return tensor
    wanted = [*args[1:], *kwargs.values()]
    like = [leaf.dtype for leaf in wanted if isinstance(leaf, Tensor)]
    dtypes = [leaf for leaf in wanted if isinstance(leaf, torch.dtype)]
    return tensor.to("meta", dtype=(dtypes or like or [tensor.dtype])[0])
