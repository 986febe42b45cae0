"""Taking things out of a module for a while: parameters, forwards, attributes, random state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.networks import modules as of_modules

attributes_replaced = of_modules.attributes_replaced
forwards_replaced = of_modules.forwards_replaced
TensorSwap = of_modules.TensorSwap

RandomState = tuple[Any, Tensor, Tensor | None]


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape without memory."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


_BLOCK = 65_536


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


def silenced(
    module: nn.Module,
    function: Callable[..., None] = lambda *_args, **_kwargs: None,
    names: Iterable[str] = ("log", "log_dict", "print"),
) -> AbstractContextManager[None]:
    """While inside, methods by which a module tells something to the world do something else."""
    return attributes_replaced((module, name, function) for name in names if hasattr(module, name))


@contextmanager
def attributes_restored(modules: Iterable[nn.Module], *, tensors: bool) -> Iterator[None]:
    """Undo what happens to the attributes of modules, and to the values of their tensors.

    Args:
        modules: The modules.
        tensors: Whether the values of parameters and buffers are saved and restored too.
    """
    modules = list(modules)
    held = (
        tensor
        for module in modules
        for table in (module._parameters, module._buffers, vars(module))  # noqa: SLF001
        for tensor in table.values()
    )
    values = [
        (tensor, tensor.detach().clone())
        for tensor in held
        if tensors and isinstance(tensor, Tensor) and not tensor.is_meta
    ]
    with of_modules.attributes_kept(modules):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)


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
