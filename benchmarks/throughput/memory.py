"""What one process holds for good: parameters, gradients, optimizer state, teacher."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.crews.messages import Bytes

COUNT_AT = 3
"""The optimizer step after which memory is counted: by then all of it is allocated."""


def count_at_step(module: nn.Module, done: Callable[[Bytes], None]) -> None:
    """Count once, right after an early optimizer step: ``done`` gets the result."""
    steps = 0

    def count_once(optimizer: Optimizer, *_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == COUNT_AT:
            done(count(module, optimizer))

    register_optimizer_step_post_hook(count_once)


def count(module: nn.Module, optimizer: Optimizer) -> Bytes:
    """Bytes of the storages that live in this process, each counted once.

    Parameters are also searched for outside ``module``: a copy that a method keeps counts.
    """
    known = [*module.parameters(), *_living_parameters()]
    trainable = [tensor for tensor in known if tensor.requires_grad]
    fixed = [tensor for tensor in known if not tensor.requires_grad]
    gradients = [tensor.grad for tensor in trainable if tensor.grad is not None]
    states = chain.from_iterable(state.values() for state in optimizer.state.values())
    seen: set[int] = set()
    return Bytes(
        student=_new_bytes(trainable, seen),
        gradients=_new_bytes(gradients, seen),
        optimizer=_new_bytes((value for value in states if isinstance(value, Tensor)), seen),
        fixed=_new_bytes([*fixed, *module.buffers()], seen),
    )


def _living_parameters() -> list[nn.Parameter]:
    # type() and not isinstance(): some objects pretend to be something else, at a price.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Parameter)]


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == "meta" or local.numel() == 0:
            continue
        storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
