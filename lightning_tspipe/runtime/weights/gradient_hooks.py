"""Hooks on gradients of parameters, which see those of a whole batch, as on one device.

autograd calls ``parameter.register_hook(...)`` with what one backward adds. A pipeline runs one for
each micro-batch and each call: what clips there would clip parts.

    parts of a batch  ──►  added up, on all ranks that hold it  ──►  hooks  ──►  + earlier batches
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def hooked(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that lie here and have hooks that get or follow their gradients."""
    found = dict.fromkeys(p for p in parameters if p._backward_hooks or _late(p))  # noqa: SLF001
    return [parameter for parameter in found if not parameter.is_meta]


@contextmanager
def whole_gradients(
    parameters: Collection[nn.Parameter], elsewhere: Iterable[nn.Parameter] = ()
) -> Iterator[None]:
    """While inside, backwards of a batch add up gradients; behind it, hooks get the sum.

    Args:
        parameters: Those with hooks.
        elsewhere: Those whose sum is not known yet: another rank has a part.
    """
    shared = set(elsewhere)
    before = {p: p.grad for p in parameters if p not in shared}
    hooks = [(p, p._backward_hooks, _late(p)) for p in parameters]  # noqa: SLF001
    for parameter, *_ in hooks:
        _set(parameter, None, {})
        if parameter not in shared:
            parameter.grad = None
    try:
        yield
    finally:
        for each in hooks:
            _set(*each)
    for parameter, known in before.items():
        run_hooks(parameter)
        if known is not None:
            own = parameter.grad
            parameter.grad = known if own is None else known.add_(own)


@torch.no_grad()
def run_hooks(parameter: nn.Parameter) -> None:
    """The hooks that may change a gradient, in the order in which they were registered."""
    if parameter.grad is None:
        return
    for hook in list((parameter._backward_hooks or {}).values()):  # noqa: SLF001 - no public way
        changed = hook(parameter.grad)
        if changed is not None:
            parameter.grad = changed


def run_late_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Those that follow when gradients are there: optimizers within the backward, say."""
    for parameter in parameters:
        if parameter.grad is not None:
            for hook in list((_late(parameter) or {}).values()):
                hook(parameter)


def _late(parameter: Any) -> dict[int, Any] | None:
    found: dict[int, Any] | None = parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return found


def _set(parameter: Any, hooks: Any, late: Any) -> None:
    parameter._backward_hooks = hooks  # noqa: SLF001
    if late is not None:  # torch does not forget them for None
        parameter._post_accumulate_grad_hooks = late  # noqa: SLF001
