"""Taking things out of a module for a while: parameters, forwards, attributes, random state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set)
_MISSING = object()

RandomState = tuple[Any, Tensor, Tensor | None]


class TensorSwap:
    """Replaces all parameters and buffers of some modules by stand-ins, and back.

    Entries of the modules' own dictionaries are exchanged, so that whoever holds a parameter
    itself (an optimizer) is not affected.

    Args:
        modules: Modules whose direct parameters and buffers are exchanged.
        make: Makes the stand-in of a tensor; a tensor that occurs twice keeps one stand-in.
        buffers: Whether buffers are exchanged too.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        make: Callable[[Tensor], Tensor],
        *,
        buffers: bool = True,
    ) -> None:
        self._entries: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        stand_ins: dict[int, Tensor] = {}
        for module in modules:
            tables: list[dict[str, Tensor | None]] = [module._parameters]  # type: ignore[list-item] # noqa: SLF001
            if buffers:
                tables.append(module._buffers)  # noqa: SLF001
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None:
                        if id(tensor) not in stand_ins:
                            stand_ins[id(tensor)] = make(tensor)
                        self._entries.append((table, name, stand_ins[id(tensor)]))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While inside, the modules hold the stand-ins."""
        originals = [table[name] for table, name, _ in self._entries]
        for table, name, stand_in in self._entries:
            table[name] = stand_in
        try:
            yield
        finally:
            for (table, name, _), original in zip(self._entries, originals, strict=True):
                table[name] = original


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor of the same kind without memory."""
    meta = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta


_BLOCK = 65_536


def arbitrary_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same kind with values such that what runs through keeps its size."""
    made = torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    if tensor.dim() > 1 and tensor.dtype.is_floating_point:
        # A block of random numbers again and again: drawing billions takes longer than measuring.
        block = torch.randn(min(_BLOCK, tensor.numel()), device=device) / tensor[0].numel() ** 0.5
        flat = made.view(-1)
        for start in range(0, len(flat), len(block)):
            part = flat[start : start + len(block)]
            part.copy_(block[: len(part)])
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same kind and values on a device."""
    made = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


@contextmanager
def forwards_replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While inside, calling one of the modules runs the given function instead of its forward."""
    previous = {module: module.__dict__.get("forward") for module in forwards}
    for module, function in forwards.items():
        module.__dict__["forward"] = function
    try:
        yield
    finally:
        for module, original in previous.items():
            if original is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = original


@contextmanager
def attributes_replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """While inside, objects have other attributes.

    Args:
        replacements: (object, name, value); none twice.
    """
    replacements = list(replacements)
    previous = [vars(owner).get(name, _MISSING) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replacements, previous, strict=True):
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextmanager
def attributes_restored(modules: Iterable[nn.Module], *, tensors: bool) -> Iterator[None]:
    """Undo what happens to the attributes of modules, and to the values of their tensors.

    Args:
        modules: The modules.
        tensors: Whether the values of parameters and buffers are saved and restored too.
    """
    saved = [
        (
            module,
            [(name, value, _copy(value, tensors=tensors)) for name, value in vars(module).items()],
        )
        for module in modules
    ]
    values = [
        (tensor, tensor.detach().clone())
        for module, _ in saved
        if tensors
        for tensor in (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
        if tensor is not None and not tensor.is_meta
    ]
    try:
        yield
    finally:
        for module, attributes in saved:
            module.__dict__.clear()
            for name, value, copied in attributes:
                _restore(value, copied)
                module.__dict__[name] = value
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)


def _copy(value: Any, *, tensors: bool) -> Any:
    """What is needed to undo in-place changes of a container or a tensor; else None."""
    if isinstance(value, _CONTAINERS):
        return value.copy()
    if tensors and isinstance(value, Tensor) and not value.is_meta:
        return value.detach().clone()
    return None


def _restore(value: Any, copied: Any) -> None:
    """Fill ``value`` again; it stays the same object, which others may hold (``TensorSwap``)."""
    if copied is None:
        return
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(copied)
        return
    value.clear()
    if isinstance(value, list):
        value.extend(copied)
    else:
        value.update(copied)


@contextmanager
def random_stream(seed: int | None) -> Iterator[None]:
    """Run with random generators of the given seed; the ambient ones stay untouched.

    Args:
        seed: Seed of the stream; None keeps the ambient values but still restores them.
    """
    ambient = random_state()
    if seed is not None:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if ambient[2] is not None:
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        set_random_state(ambient)


def random_state() -> RandomState:
    """The state of all random generators: of Python, of torch, and of torch on the GPU."""
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), torch.random.get_rng_state(), cuda_state


def set_random_state(state: RandomState) -> None:
    """Put the random generators back to where they were."""
    python_state, torch_state, cuda_state = state
    random.setstate(python_state)
    torch.random.set_rng_state(torch_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state)
