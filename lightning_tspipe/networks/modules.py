"""Modules from outside: what can be said without running them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from inspect import isfunction
from operator import is_
from typing import Any

from torch import Tensor, nn

CONTAINERS = (list, dict, set)
LIBRARIES = (
    "builtins", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics",
)  # fmt: skip
"""Packages whose classes are not the user's."""
_RECORDING = ("transformers.utils.output_capturing", "lightning_tspipe.networks.hooks")
_MOST_ENTRIES = 1000
"""Longer containers hold data."""


def outermost(names: Iterable[str]) -> tuple[str, ...]:
    """Those of some dotted names that lie in no other one, each once, in order.

    >>> outermost(["a.b", "a", "c.d", "c.d"])
    ('a', 'c.d')
    """
    found = dict.fromkeys(names)
    return tuple(name for name in found if not any(name.startswith(f"{other}.") for other in found))


def _users_classes(module: nn.Module) -> list[type]:
    """Those of the module's classes that are the user's, the most basic one first."""
    kinds = type(module).__mro__[::-1]
    return [kind for kind in kinds if kind.__module__.partition(".")[0] not in LIBRARIES]


def methods_of(module: nn.Module) -> list[str]:
    """What the user's classes of a module define beside ``forward``, and a step may call."""
    own = (vars(kind) for kind in _users_classes(module) if issubclass(kind, nn.Module))
    found = {name for table in own for name, value in table.items() if isfunction(value)}
    return sorted(name for name in found if not hasattr(nn.Module, name))


def title(module: nn.Module, name: str) -> str:
    """How messages call a network."""
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def is_recording(hook: Callable[..., Any]) -> bool:
    """Whether a hook only notes what a module returns, as those of transformers do if asked to."""
    return getattr(hook, "__module__", "") in _RECORDING


def runs_more(module: nn.Module) -> bool:
    """Whether calling the module runs something before its ``forward``, or in its backward."""
    # nn.Module has no public way to ask.
    return bool(module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)  # noqa: SLF001


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs more than its ``forward``."""
    return runs_more(module) or not all(map(is_recording, module._forward_hooks.values()))  # noqa: SLF001


def blocks_of(module: nn.Module) -> list[nn.Module] | None:
    """The submodules that the module applies in turn, if it is of a kind that says so."""
    if type(module) is nn.TransformerEncoder:
        return [*module.layers, *([module.norm] if module.norm is not None else [])]
    blocks: Callable[[], Iterable[nn.Module]] | None = getattr(module, "pipeline_blocks", None)
    return None if blocks is None else list(blocks())


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is called as a whole instead of being looked into."""
    return has_hooks(module) or is_torchs(module)


def is_basic(module: nn.Module) -> bool:
    """Whether a module is one of torch's own without submodules."""
    return is_torchs(module) and not any(True for _ in module.children())


def is_torchs(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that does the work itself."""
    if type(module) is nn.Sequential or blocks_of(module) is not None:
        return False
    return type(module).__module__.startswith(("torch.nn", "torch.ao.nn", "torch._dynamo"))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object of a user's class holds; None of modules, tensors, and what has none."""
    is_other = isinstance(value, (nn.Module, Tensor, type, enum.Enum))
    library = type(value).__module__.partition(".")[0]
    return None if is_other or library in LIBRARIES else getattr(value, "__dict__", None)


def hold_the_same(one: Any, other: Any) -> bool:
    """Whether two containers of one type hold the same objects."""
    if not one or len(one) != len(other):
        return not (one or other)
    if isinstance(one, (set, frozenset)):
        return bool(one == other)
    pair = ([*each, *each.values()] if isinstance(each, dict) else each for each in (one, other))
    return all(map(is_, *pair))


def containers_of_class(module: nn.Module) -> dict[str, Any]:
    """Lists, dicts and sets that a user's class holds for all its instances, by their names."""
    return {
        name: value
        for kind in _users_classes(module)
        for name, value in vars(kind).copy().items()  # another thread may set one meanwhile
        if isinstance(value, CONTAINERS) and not name.startswith("__")
    }


def tables_in(tables: Iterable[Any]) -> Iterator[Any]:
    """Lists and dicts, and those in them, attributes of the user's objects too; each once."""
    todo, seen = list(tables), set[int]()
    while todo:
        table = todo.pop()
        if id(table) not in seen:
            seen.add(id(table))
            yield table
            found = map(inside, table.values() if isinstance(table, dict) else table)
            todo += [each for each in found if each is not None and len(each) <= _MOST_ENTRIES]


def inside(value: Any) -> Any:
    """A container's entries, or an object's attributes; None for what is not looked into."""
    return value if isinstance(value, (list, tuple, dict)) else attributes_of(value)
