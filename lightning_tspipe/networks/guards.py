"""Guards: what a recorded forward has read of its modules, and whether that still is so.

A recording holds for the attributes that it has seen: the mode, a temperature, the submodules, the
absence of hooks. A network that has changed one of them is recorded again.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, enum.Enum, torch.dtype, torch.device)
_CONTAINERS = (tuple, list, dict, set, frozenset)
# Of every module; calling one reads them, and torch writes some of them.
_INTERNAL = frozenset({*vars(nn.Module()), "_compiled_call_impl"} - {"training"})
_MISSING = object()
_Read = tuple[dict[str, Any], str, Any, str]
"""Where an attribute lies, its name there, the value that it had, its dotted path."""


class Guards:
    """What was read, with the values that it had.

    Args:
        network: Whose forward it is.
        entries: As the attribute.

    Attributes:
        entries: Modules whose hooks are the step's: it runs them around what they return.
    """

    def __init__(self, network: nn.Module, entries: Collection[nn.Module]) -> None:
        self._network, self.entries = network, entries
        self._paths: dict[nn.Module, str] = {}
        self._read: dict[tuple[int, str], _Read] = {}
        self._hooks: list[dict[int, Any]] = []
        self._are_same: Callable[[], bool] = bool
        self._copied: list[_Read] = []
        self._parts: list[dict[str, Any]] = []
        self._parts_before: list[dict[str, Any]] = []

    @contextmanager
    def watching(self, is_whole: Callable[[nn.Module], bool]) -> Iterator[None]:
        """While inside, what is read of the modules is noted.

        Args:
            is_whole: Whether a module is called as a whole: then it reads its own attributes
                whenever it runs.
        """
        self._look_into(self._network, "", is_whole)
        known = {id(module) for module in self._paths}
        with ExitStack() as stack:
            for kind in {type(child) for child in self._paths}:
                noting = self._noting(kind.__getattribute__, known)
                stack.enter_context(mock.patch.object(kind, "__getattribute__", noting))
            yield
        for child in self._paths:
            self._parts.append(child._modules)  # noqa: SLF001 - what it is made of
            if child not in self.entries:
                self._hooks += [child._forward_hooks, child._forward_pre_hooks]  # noqa: SLF001
                self._hooks += [child._backward_hooks, child._backward_pre_hooks]  # noqa: SLF001
        self._parts_before = [parts.copy() for parts in self._parts]
        own, copied = list[_Read](), list[_Read]()
        for read in self._read.values():
            (own if read[0].get(read[1]) is read[2] else copied).append(read)
        self._are_same, self._copied = _comparison(own), copied

    def _look_into(
        self, module: nn.Module, path: str, is_whole: Callable[[nn.Module], bool]
    ) -> None:
        self._paths[module] = path
        for name, child in module.named_children():
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)  # which nobody calls
            if child not in self._paths and (is_list or not is_whole(child)):
                self._look_into(child, f"{path}.{name}".strip("."), is_whole)

    def _noting(self, read: Callable[..., Any], known: Collection[int]) -> Any:
        def noting(module: Any, name: str) -> Any:
            value = read(module, name)
            if id(module) in known and name not in _INTERNAL:
                own = read(module, "__dict__")
                if name in own:
                    self._note(own, module, name, value)
            return value

        return noting

    def _note(self, table: Any, module: nn.Module, name: str, value: Any) -> None:
        path = ".".join(filter(None, (self._paths[module], name)))
        kept = copy.copy(value) if _is_plain(value) else value
        self._read.setdefault((id(table), name), (table, name, kept, path))

    def hold(self) -> bool:
        """Whether all is as it was."""
        if any(self._hooks) or self._parts != self._parts_before:
            return False
        if not all(map(_holds, self._copied)):
            return False
        try:
            return self._are_same() or all(map(_holds, self._read.values()))
        except KeyError:  # one is gone
            return False

    def broken(self) -> str:
        """What is not as it was; "" if all is."""
        for table, name, value, path in self._read.values():
            now = table.get(name, _MISSING)
            if not _is_same(now, value):
                return f"`{path}` was {value!r} and is {now!r} now"
        for path, now, before in zip(
            self._paths.values(), self._parts, self._parts_before, strict=True
        ):
            for name in now.keys() | before.keys():
                if now.get(name) is not before.get(name):
                    return f"`{f'{path}.{name}'.strip('.')}` is another module now"
        return "a hook was registered" if any(self._hooks) else ""


def _comparison(reads: Sequence[_Read]) -> Callable[[], bool]:
    """Tells whether attributes are the same objects; one expression, since each step asks it."""
    given: dict[str, Any] = {}
    terms = ["True"]
    for number, (table, name, value, _) in enumerate(reads):
        given |= {f"t{number}": table, f"v{number}": value}
        terms.append(f"t{number}[{name!r}] is v{number}")
    compared: Callable[[], bool] = eval(f"lambda: {' and '.join(terms)}", given)  # noqa: S307 - its own
    return compared


def _holds(read: _Read) -> bool:
    table, name, value, _ = read
    return _is_same(table.get(name, _MISSING), value)


def _is_same(now: Any, value: Any) -> bool:
    return now is value or (type(now) is type(value) and _is_plain(value) and bool(now == value))


def _is_plain(value: Any) -> bool:
    """Whether its value is all there is of it, and not who it is."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, _CONTAINERS):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
