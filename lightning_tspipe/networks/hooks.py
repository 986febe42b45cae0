"""Forward hooks on parts of a network: what they are given is noted where the parts run.

Such a hook may keep it, and the loss read what was kept. So the network notes it in the place of
its hooks, as more that it returns, and they are called where the step runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_tspipe.networks.arguments import tensors_in
from lightning_tspipe.networks.modules import inside, is_recording, runs_more, tables_in
from lightning_tspipe.networks.swap import tables_restored

Given = tuple[Any, Any, Any]
"""What a part was called with, by position and by name, and what it returned."""


class Notes:
    """A forward hook that notes what modules are given and return.

    Attributes:
        modules: In the order in which they were called.
        given: Of each.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.given: list[Given] = []
        self._versions: dict[int, int] = {}

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note a call."""
        self.modules.append(module)
        self.given.append((args, kwargs, output))
        for tensor in tensors_in(self.given[-1]):
            self._versions.setdefault(id(tensor), tensor._version)  # noqa: SLF001

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a tensor was noted, and was written into after that."""
        return self._versions.get(id(tensor), tensor._version) != tensor._version  # noqa: SLF001


@contextmanager
def noted(modules: Iterable[nn.Module]) -> Iterator[Notes]:
    """While inside, what modules are given and return is noted, and their hooks are not called."""
    notes = Notes()
    with ExitStack() as stack:
        for module in dict.fromkeys(modules):
            table = module._forward_hooks  # noqa: SLF001
            own = own_hooks(table)
            stack.callback(table.update, own)
            for key in own:
                del table[key]
            stack.enter_context(module.register_forward_hook(notes, with_kwargs=True))
        yield notes


def is_noted(module: nn.Module) -> bool:
    """Whether what a module is given and returns is noted."""
    return any(isinstance(hook, Notes) for hook in module._forward_hooks.values())  # noqa: SLF001


def keeps(part: nn.Module, network: nn.Module) -> bool:
    """Whether a part has forward hooks, and no others, that keep something for the step.

    Those that keep something for the network itself, in an object that it holds, run within it, as
    in some of timm's feature extractors.
    """
    hooks = own_hooks(part._forward_hooks)  # noqa: SLF001 - there is no public way
    if not hooks or runs_more(part):
        return False
    modules = list(network.modules())
    held = {*map(id, modules)}
    for module in modules:
        own = {name: v for name, v in vars(module).items() if not name.startswith("_forward_hooks")}
        held |= set(map(id, tables_in([own])))
    reached = (value for hook in hooks.values() for value in _reached(hook))
    return held.isdisjoint(id(v if isinstance(v, nn.Module) else inside(v)) for v in reached)


def hand_over(
    network: nn.Module, names: Sequence[str], given: Sequence[Given], undo: ExitStack | None = None
) -> str:
    """Call the hooks of parts with what was noted.

    Args:
        network: The network.
        names: The parts, in the order in which they were called.
        given: What was noted of each.
        undo: Gets what takes back what they have kept in lists, dicts and objects.

    Returns:
        The first part with a hook that changes what it returns; "": there is none.
    """
    for name, (args, kwargs, output) in zip(names, given, strict=True):
        part = network.get_submodule(name)
        for key, hook in own_hooks(part._forward_hooks).items():  # noqa: SLF001
            more = (kwargs,) if key in part._forward_hooks_with_kwargs else ()  # noqa: SLF001
            if undo is not None:
                undo.enter_context(tables_restored(_tables(hook)))
            returned = hook(part, args, *more, output)
            if returned is not None and returned is not output:
                return name
    return ""


def own_hooks(table: Mapping[int, Any]) -> dict[int, Any]:
    """Those of some forward hooks that do more than noting what a module returns."""
    return {key: hook for key, hook in table.items() if not is_recording(hook)}


def _reached(hook: Any) -> Iterator[Any]:
    """What a hook can write into: itself, what it is a method of or bound to, and its variables."""
    while isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        hook = hook.func
    yield hook
    yield getattr(hook, "__self__", None)
    yield from (cell.cell_contents for cell in getattr(hook, "__closure__", None) or ())


def _tables(hook: Any) -> list[Any]:
    """The lists and dicts that a hook can reach; no attributes of modules."""
    reached = list(_reached(hook))
    own = [reached, *(vars(value) for value in reached if isinstance(value, nn.Module))]
    starts = set(map(id, own))
    return [each for each in tables_in(own) if id(each) not in starts]
