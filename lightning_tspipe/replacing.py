"""What objects, dictionaries and modules hold, replaced for a while; and what is set of modules."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MISSING = object()
PLAIN = (type(None), bool, int, float, complex, str, enum.Enum, torch.dtype, torch.device)
"""Types of values that are nothing beside what they tell."""


@contextmanager
def entries_replaced(entries: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """While inside, dictionaries have other values under names that they have already.

    Args:
        entries: (dictionary, name, value); none twice.
    """
    originals = [table[name] for table, name, _ in entries]
    for table, name, value in entries:
        table[name] = value
    try:
        yield
    finally:
        for (table, name, _), original in zip(entries, originals, strict=True):
            table[name] = original


class TensorSwap:
    """Replaces all parameters and buffers of some modules by stand-ins, and back.

    Entries of the modules' own dictionaries are exchanged, so that whoever holds a parameter
    itself (an optimizer) is not affected.

    Args:
        modules: Modules whose direct parameters and buffers are exchanged.
        make: Makes the stand-in of a tensor, which becomes a parameter for a parameter; a tensor
            that occurs twice keeps one stand-in.
    """

    def __init__(self, modules: Iterable[nn.Module], make: Callable[[Tensor], Tensor]) -> None:
        self._entries: list[tuple[dict[str, Any], str, Tensor]] = []
        stand_ins: dict[int, Tensor] = {}
        for module in modules:
            for table in (module._parameters, module._buffers):  # noqa: SLF001
                for name, tensor in table.items():
                    if tensor is not None:
                        if id(tensor) not in stand_ins:
                            made = make(tensor)
                            wants = isinstance(tensor, nn.Parameter)
                            if wants and not isinstance(made, nn.Parameter):
                                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                            stand_ins[id(tensor)] = made
                        self._entries.append((table, name, stand_ins[id(tensor)]))

    def __call__(self) -> AbstractContextManager[None]:
        """While inside, the modules hold the stand-ins."""
        return entries_replaced(self._entries)


@contextmanager
def attributes_replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """While inside, objects have other attributes, or tensors other gradients or data.

    Args:
        replacements: (object, name, value); none twice.
    """
    replacements = list(replacements)
    previous = [_own(owner, name) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        _set(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replacements, previous, strict=True):
            if original is _MISSING:
                object.__delattr__(owner, name)
            else:
                _set(owner, name, original)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; a module's own way takes longer than all else that happens meanwhile."""
    (setattr if isinstance(owner, type) else object.__setattr__)(owner, name, value)


def _own(owner: Any, name: str) -> Any:
    """What an object has itself under a name; ``_MISSING`` where it has its class's."""
    # ``vars`` of a tensor don't show its gradient or its data.
    return getattr(owner, name) if isinstance(owner, Tensor) else vars(owner).get(name, _MISSING)


Settings = dict[tuple[nn.Module, str], Any]
"""What may be set of modules, by the module and the name."""


def settings_of(modules: Iterable[nn.Module]) -> Settings:
    """Plain attributes of modules, such as the mode, and of parameters whether they are trained."""
    found: Settings = {}
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - whoever watches a step need not know
        for module in modules:
            own = vars(module).items()
            found |= {(module, name): value for name, value in own if isinstance(value, PLAIN)}
            for name, parameter in module._parameters.items():  # noqa: SLF001
                found[module, name] = parameter is not None and parameter.requires_grad
    return found


def set_one(module: nn.Module, name: str, value: Any) -> None:
    """Set one of :func:`settings_of` a module."""
    parameter = module._parameters.get(name)  # noqa: SLF001
    if parameter is None:
        vars(module)[name] = value
    else:
        parameter.requires_grad_(value)


@contextmanager
def settings_applied(settings: Settings) -> Iterator[None]:
    """While inside, modules have other settings."""
    before = settings_of({module for module, _ in settings}) if settings else {}
    for key, value in settings.items():
        set_one(*key, value)
    try:
        yield
    finally:
        for key in settings:
            set_one(*key, before[key])
