"""Tensors of modules, moved to another device or given other values; a parameter stays itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

_BLOCK = 65_536


def move(
    module: nn.Module, device: torch.device, place: Callable[[str], torch.device | str | None]
) -> None:
    """Move parameters and buffers of a module, and all states of its metrics.

    What has no values, on the meta device or before a lazy module's first call, stays so.

    Args:
        module: The module.
        device: Where metrics go (torchmetrics keeps states beside the buffers).
        place: Says where a parameter or buffer goes, by its name; None: it stays where it is. A
            tied parameter goes where the first of its names does that goes anywhere.
    """
    made: dict[tuple[int, str], Tensor] = {}

    def moved(where: torch.device | str | None, tensor: Tensor) -> Tensor:
        if where is None or _is_empty(tensor) or tensor.device == torch.device(where):
            return tensor
        key = id(tensor), str(where)  # a buffer may have two names
        return made.setdefault(key, tensor.detach().to(where))

    named = list(module.named_parameters(remove_duplicate=False))
    places = {own: where for n, own in named[::-1] if (where := place(n)) is not None}
    going = [(own, v) for own, where in places.items() if (v := moved(where, own)) is not own]
    if going:
        forget_graphs(module)
        with _recurrent_weights_free(module):
            for parameter, value in going:
                put(module, parameter, value)
    for prefix, child in module.named_modules():
        if hasattr(child, "metric_state"):
            child.to(device)
        table = child._buffers  # noqa: SLF001 - no public way
        there = {key: buffer for key, buffer in table.items() if buffer is not None}
        names = {key: f"{prefix}.{key}" if prefix else key for key in there}
        table |= {key: moved(place(names[key]), value) for key, value in there.items()}


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta or nn.parameter.is_lazy(tensor)


def put(module: nn.Module, old: Tensor, value: Tensor) -> Callable[[], None]:
    """Give a parameter or buffer other values, perhaps elsewhere; a parameter keeps its identity.

    Returns:
        A function that takes the value back.
    """
    if isinstance(old, nn.Parameter):
        made = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
        made.__dict__.update(old.__dict__)
        _swap(old, made)
        return partial(_swap, old, made)
    value = value.to(old.dtype)
    places = [
        (child, key)
        for child in module.modules()
        for key, buffer in child._buffers.items()  # noqa: SLF001 - a buffer may have two places
        if buffer is old
    ]

    def exchange(buffer: Tensor) -> None:
        for child, key in places:
            child._buffers[key] = buffer  # noqa: SLF001

    exchange(value)
    return partial(exchange, old)


def _swap(one: nn.Parameter, other: nn.Parameter) -> None:
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:  # a graph that nobody needs any more refers to it
        gc.collect()
        torch.utils.swap_tensors(one, other)


def forget_graphs(module: nn.Module) -> None:
    """Keep no graph in attributes, such as ``weight_norm``'s weight, which is computed anew.

    A graph holds on to its parameters, which then can't be exchanged in place.
    """
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(child)[name] = value.detach()


@contextmanager
def _recurrent_weights_free(module: nn.Module) -> Iterator[None]:
    """While inside, nn.LSTM and its like keep no weak references, which forbid swapping weights."""
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    for child in recurrent:
        child._flat_weight_refs = []  # noqa: SLF001 - as torch's own moves drop them
    yield
    for child in recurrent:
        child._init_flat_weights()  # noqa: SLF001


def arbitrary_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape with values such that what runs through keeps its size."""
    made = torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    if tensor.dim() > 1 and tensor.dtype.is_floating_point:
        # A block of random numbers again and again: drawing billions takes longer than measuring.
        block = torch.randn(min(_BLOCK, tensor.numel()), device=device) / tensor[0].numel() ** 0.5
        flat = made.view(-1)
        for start in range(0, len(flat), len(block)):
            part = flat[start : start + len(block)]
            part.copy_(block[: len(part)])
    return made
