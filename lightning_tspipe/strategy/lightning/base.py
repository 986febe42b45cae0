"""The base class of the strategy: Lightning's own, of the namespace whose Trainer uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import getattr_static, isfunction
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from lightning_tspipe.strategy.lightning.namespaces import Namespace, installed_namespaces

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy
    from pytorch_lightning.strategies import ParallelStrategy as OtherParallelStrategy

    class LightningStrategy(ParallelStrategy, OtherParallelStrategy):  # type: ignore[misc]
        """A strategy to both Trainers; inherited methods are those of ``namespace``."""

        namespace: Namespace
        """Known when a Trainer hands over its accelerator; until then the first installed one."""


class StrategyArguments(TypedDict, total=False):
    """Arguments of every Lightning strategy; of plugins, two namespaces have no common type."""

    accelerator: Any
    parallel_devices: list[torch.device] | None
    cluster_environment: Any
    checkpoint_io: Any
    precision_plugin: Any


def _method(choices: Mapping[str, Callable[..., Any]], default: Callable[..., Any]) -> Any:
    @wraps(default)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return choices[self.namespace.name](self, *args, **kwargs)

    # Lightning looks below one decorator to see whether a method is overridden.
    vars(call)["__wrapped__"] = getattr(default, "__wrapped__", default)
    return call


def _property(choices: Mapping[str, Any], default: property) -> property:
    def get(self: Any) -> Any:
        return choices[self.namespace.name].fget(self)

    def set_(self: Any, value: Any) -> None:
        choices[self.namespace.name].fset(self, value)

    return property(get, None if default.fset is None else set_, doc=default.__doc__)


def _joined() -> type:
    """A class below the strategies of all namespaces, which dispatches what it inherits.

    Python's own order of methods would give every object those of the first namespace.
    """
    bases = {each.name: each.strategies.ParallelStrategy for each in installed_namespaces()}
    first = next(iter(bases.values()))
    members: dict[str, Any] = {"__doc__": _joined.__doc__, "__module__": __name__}
    for name in dir(first):
        default: Any = getattr_static(first, name)
        choices = {key: getattr_static(base, name, default) for key, base in bases.items()}
        if isinstance(default, property):
            members[name] = _property(choices, default)
        elif isfunction(default) and not name.startswith("__"):
            members[name] = _method(choices, default)
    made: type = type(first)("LightningStrategy", tuple(bases.values()), members)
    return made


if not TYPE_CHECKING:
    LightningStrategy = _joined()
