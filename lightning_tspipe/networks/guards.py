"""Guards: what a recorded forward has read of its modules, and whether that still is so.

A recording holds for the attributes that it has seen: the mode, a temperature, the submodules, the
absence of hooks. A network that has changed one of them is recorded again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

from torch import nn

from lightning_tspipe.networks.modules import attributes_of, hold_the_same, tables_in
from lightning_tspipe.replacing import PLAIN

_CONTAINERS = (tuple, list, dict, set, frozenset)
# Of every module; calling one reads them, and torch writes some of them.
_INTERNAL = frozenset({*vars(nn.Module()), "_compiled_call_impl"} - {"training"})
_Read = tuple[Mapping[str, Any], str, Any, str]
"""Where an attribute lies, its name there, the value that it had, its dotted path."""


_moment: ContextVar[object] = ContextVar("moment", default=None)
"""None: nobody knows how long it lasts."""


@contextmanager
def one_moment() -> Iterator[Callable[[], object]]:
    """While inside, only the networks run on this thread, which leave alone what they have read.

    Yields:
        What says that somebody else has run, and has perhaps changed something.
    """
    before = _moment.set(object())
    try:
        yield lambda: _moment.set(object())
    finally:
        _moment.reset(before)


class _Missing:
    """The value of an attribute that an object hasn't got itself."""

    def __repr__(self) -> str:
        return "that of its class"


_MISSING = _Missing()


class Guards:
    """What was read, with the values that it had.

    Args:
        network: Whose forward it is.
        entries: As the attribute.

    Attributes:
        entries: Modules whose hooks are the step's: it runs them around what they return.
        kept: What the forward has written itself, by dotted paths; it is not compared.
    """

    def __init__(self, network: nn.Module, entries: Collection[nn.Module]) -> None:
        self._network, self.entries = network, entries
        self.kept: dict[str, Any] = {}
        self._paths: dict[nn.Module, str] = {}
        self._watched: dict[int, str] = {}
        """Paths of modules, and of objects that they hold, by ids."""
        self._kinds: set[type] = set()
        self._patches = ExitStack()
        self._read: dict[tuple[int, str], _Read] = {}
        self._before: dict[int, Any] = {}
        """Copies of lists and dicts as they were before the forward, by ids."""
        self._hooks: list[dict[int, Any]] = []
        self._hooks_before: list[dict[int, Any]] = []
        self._held_in: object = None
        self._are_same: Callable[[], bool] = bool
        self._copied: list[_Read] = []
        self._parts: list[dict[str, Any]] = []
        self._parts_before: list[dict[str, Any]] = []

    @contextmanager
    def watching(self, is_whole: Callable[[nn.Module], bool]) -> Iterator[None]:
        """While inside, what is read of the modules, and of objects that they hold, is noted.

        Args:
            is_whole: Whether a module is called as a whole: then it reads its own attributes
                whenever it runs.
        """
        self._look_into(self._network, "", is_whole)
        tables = tables_in(map(vars, self._paths))
        self._before = {id(each): each.copy() for each in tables if isinstance(each, (list, dict))}
        with self._patches:
            for child, path in self._paths.items():
                self._watch(child, path)
            yield
        for child, path in self._paths.items():
            self._parts.append(child._modules)  # noqa: SLF001 - what it is made of
            for table in (child._parameters, child._buffers):  # noqa: SLF001
                for name in (name for name, tensor in table.items() if tensor is None):
                    self._note(table, table, name, path)
            if child not in self.entries:
                self._hooks += [child._forward_hooks, child._forward_pre_hooks]  # noqa: SLF001
                self._hooks += [child._backward_hooks, child._backward_pre_hooks]  # noqa: SLF001
        self._hooks_before = [hooks.copy() for hooks in self._hooks]
        self._parts_before = [parts.copy() for parts in self._parts]
        self._sort()
        self._before = {}

    def _sort(self) -> None:
        """Tell what is compared from what the forward has written itself."""
        own, copied = list[_Read](), list[_Read]()
        for key, read in list(self._read.items()):
            if read[0].get(read[1], _MISSING) is read[2]:
                own.append(read)
            elif _holds(read):
                copied.append(read)
            else:
                table, name, _, path = self._read.pop(key)
                self.kept[path] = table.get(name)
        self._are_same, self._copied = _comparison(own), copied

    def _look_into(
        self, module: nn.Module, path: str, is_whole: Callable[[nn.Module], bool]
    ) -> None:
        self._paths[module] = path
        for name, child in module.named_children():
            is_list = type(child).forward is nn.Module.forward  # which nobody calls
            if child not in self._paths and (is_list or not is_whole(child)):
                self._look_into(child, f"{path}.{name}".strip("."), is_whole)

    def _watch(self, owner: Any, path: str) -> None:
        """Note what is read of an object from now on; of one of C's classes, all that it has."""
        self._watched.setdefault(id(owner), path)
        kind = type(owner)
        if kind in self._kinds:
            return
        noting = self._noting(kind.__getattribute__)
        try:
            self._patches.enter_context(mock.patch.object(kind, "__getattribute__", noting))
            self._kinds.add(kind)
        except TypeError:
            for name in list(vars(owner)):
                self._note_read(owner, vars(owner), name)

    def _noting(self, read: Callable[..., Any]) -> Any:
        def noting(owner: Any, name: str) -> Any:
            value = read(owner, name)
            if id(owner) in self._watched and name not in _INTERNAL:
                self._note_read(owner, read(owner, "__dict__"), name)
            return value

        return noting

    def _note_read(self, owner: Any, own: dict[str, Any], name: str) -> None:
        path = self._watched[id(owner)]
        if name in own:
            self._note(own, own, name, path)
            if attributes_of(own[name]) is not None:
                self._watch(own[name], f"{path}.{name}".strip("."))
            return
        # What a class says holds until an object says something else.
        kind = next((kind for kind in type(owner).__mro__ if name in vars(kind)), None)
        if kind is not None and _is_plain(vars(kind)[name]):
            self._note(own, own, name, path)
            self._note(kind, vars(kind), name, path)

    def _note(self, owner: object, table: Mapping[str, Any], name: str, path: str) -> None:
        key = id(owner), name
        if key in self._read:
            return
        # Something else may have written it before it is read this way, a hook for example.
        value = self._before.get(id(table), table).get(name, _MISSING)
        if isinstance(value, _CONTAINERS):
            value = self._before.get(id(value), value)
            value = copy.deepcopy(value) if _is_plain(value) else copy.copy(value)
        self._read[key] = table, name, value, f"{path}.{name}".strip(".")

    @property
    def reads(self) -> Collection[tuple[int, str]]:
        """The attributes that are compared: ids of the dictionaries they lie in, and names."""
        return self._read.keys()

    def hold(self) -> bool:
        """Whether all is as it was; within one moment, it is looked at once."""
        now = _moment.get()
        if now is not None and self._held_in is now:
            return True
        holds = self._hold_now()
        self._held_in = now if holds else None
        return holds

    def _hold_now(self) -> bool:
        if self._parts != self._parts_before or self._has_other_hooks():
            return False
        if not all(map(_holds, self._copied)):
            return False
        try:
            return self._are_same() or all(map(_holds, self._read.values()))
        except KeyError:  # one is gone
            return False

    def _has_other_hooks(self) -> bool:
        return any(self._hooks) and self._hooks != self._hooks_before

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
        return "a hook was registered" if self._has_other_hooks() else ""


def _comparison(reads: Sequence[_Read]) -> Callable[[], bool]:
    """Tells whether attributes are the same objects; one expression, since each step asks it."""
    given: dict[str, Any] = {}
    terms = ["True"]
    for number, (table, name, value, _) in enumerate(reads):
        given |= {f"t{number}": table, f"v{number}": value}
        is_same = f"{name!r} not in t" if value is _MISSING else f"t{number}[{name!r}] is v"
        terms.append(f"{is_same}{number}")
    compared: Callable[[], bool] = eval(f"lambda: {' and '.join(terms)}", given)  # noqa: S307 - its own
    return compared


def _holds(read: _Read) -> bool:
    table, name, value, _ = read
    return _is_same(table.get(name, _MISSING), value)


def _is_same(now: Any, value: Any) -> bool:
    if now is value or type(now) is not type(value):
        return now is value
    if _is_plain(value):
        return bool(now == value)
    return isinstance(value, _CONTAINERS) and hold_the_same(now, value)


def _is_plain(value: Any) -> bool:
    """Whether its value is all there is of it, and not who it is."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, _CONTAINERS):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)
