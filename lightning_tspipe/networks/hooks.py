"""Forward hooks on parts of a network: what they are given is noted where the parts run.

Such a hook may keep it, and the loss read what was kept. So the network notes it in the place of
its hooks, as more that it returns, and they are called where the step runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_tspipe.networks.modules import Notes, is_recording

Given = tuple[Any, Any, Any]
"""What a part was called with, by position and by name, and what it returned."""


@contextmanager
def noted(modules: Iterable[nn.Module]) -> Iterator[Notes]:
    """While inside, what modules are given and return is noted, and their hooks are not called."""
    modules = list(dict.fromkeys(modules))
    notes = Notes()
    tables = [module._forward_hooks for module in modules]  # noqa: SLF001 - there is no public way
    before = [dict(table) for table in tables]
    for table in tables:
        for key, hook in list(table.items()):
            if not is_recording(hook):
                del table[key]
    handles = [module.register_forward_hook(notes, with_kwargs=True) for module in modules]
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()
        for table, own in zip(tables, before, strict=True):
            new = dict(table)
            table.clear()
            table.update({**own, **new})


def hand_over(network: nn.Module, names: Sequence[str], given: Sequence[Given]) -> str:
    """Call the hooks of parts with what was noted.

    Args:
        network: The network.
        names: The parts, in the order in which they were called.
        given: What was noted of each.

    Returns:
        The first part with a hook that changes what it returns; "": there is none.
    """
    for name, (args, kwargs, output) in zip(names, given, strict=True):
        part = network.get_submodule(name)
        for key, hook in list(part._forward_hooks.items()):  # noqa: SLF001
            if is_recording(hook):
                continue
            more = (kwargs,) if key in part._forward_hooks_with_kwargs else ()  # noqa: SLF001
            returned = hook(part, args, *more, output)
            if returned is not None and returned is not output:
                return name
    return ""
