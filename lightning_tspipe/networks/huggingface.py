"""What tracing has to know of Hugging Face's transformers.

Two things of theirs happen beside ``forward``: hidden states are collected by hooks, installed at
the first call that asks for them, and attention masks are made by functions that look at values.
While a network is traced, the hooks run, and such a function is one call of the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any
from unittest import mock

from torch import fx, nn
from torch.utils import _pytree as pytree

_CAPTURING = "transformers.utils.output_capturing"
_MASKING = "transformers.masking_utils"
INSTALLED_MARK = "_output_capturing_hooks_installed"


def is_recording(hook: Callable[..., Any]) -> bool:
    """Whether a hook only notes what a module returns, if it was asked to."""
    return getattr(hook, "__module__", "") == _CAPTURING


def is_recorded(module: nn.Module, arguments: tuple[Any, ...], output: object) -> bool:
    """Whether someone who runs now wants to know what a module returns; then its hooks note it."""
    capturing = sys.modules.get(_CAPTURING)
    collector = capturing._active_collector.get() if capturing is not None else None  # noqa: SLF001
    if not collector:
        return False
    before = {key: len(noted) for key, noted in collector.items() if isinstance(noted, list)}
    for hook in filter(is_recording, module._forward_hooks.values()):  # noqa: SLF001
        hook(module, arguments, output)
    return any(len(collector[key]) != number for key, number in before.items())


@contextmanager
def masks_as_calls(root: nn.Module, tracer: fx.Tracer) -> Iterator[None]:
    """While inside, functions that make attention masks are calls of the graph."""
    files = {type(module).__module__ for module in root.modules()}
    with ExitStack() as stack:
        for file in sorted(file for file in files if file.startswith("transformers.")):
            names = vars(sys.modules[file])
            made = {
                name: partial(_make_mask, tracer, value)
                for name, value in names.items()
                if getattr(value, "__module__", "") == _MASKING
                and name.startswith("create_")
                and name.endswith("_mask")
            }
            stack.enter_context(mock.patch.dict(names, made))
        yield


def _make_mask(tracer: fx.Tracer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    proxies = [leaf for leaf in leaves if isinstance(leaf, fx.Proxy)]
    if not proxies:
        return function(*args, **kwargs)
    # Without padding they may return None, which cannot be sent between stages.
    always = {name: False for name in signature(function).parameters if name.endswith("_skip")}

    @wraps(function)
    def make(*tensors: Any) -> Any:
        values = iter(tensors)
        filled = [next(values) if isinstance(leaf, fx.Proxy) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return function(*args, **{**kwargs, **always})

    return tracer.create_proxy("call_function", make, tuple(proxies), {})
