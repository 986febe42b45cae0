"""The two Lightning namespaces, ``lightning.pytorch`` and ``pytorch_lightning``, as one.

They are separate copies of one code base, with separate registries; each refuses the other's
modules and strategies. This module is the only place that knows both. The base class of the
strategy is here too: Lightning's own, of the namespace whose Trainer uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib.util import find_spec
from inspect import getattr_static, isfunction
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from typing_extensions import override

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_PARTS = {
    "strategies": "{package}.strategies",
    "callbacks": "{package}.callbacks",
    "workers": "{package}.strategies.launchers.multiprocessing",
    "scripts": "{package}.strategies.launchers.subprocess_script",
    "async_checkpoint_io": "{package}.plugins.io:AsyncCheckpointIO",
    "torch_checkpoint_io": "{fabric}.plugins.io.torch_io:TorchCheckpointIO",
    "sigterm_exception": "{package}.utilities.exceptions:SIGTERMException",
    # The decorator that holds this process's rank
    "rank_zero_only": "{package}.utilities.rank_zero:rank_zero_only",
    "optimizers_to_device": "{fabric}.utilities.optimizer:_optimizers_to_device",
    "init_dist_connection": "{fabric}.utilities.distributed:_init_dist_connection",
    # Tells callbacks, strategy and loggers that an exception ends the run
    "interrupt": "{package}.trainer.call:_interrupt",
    "module": "{package}:LightningModule",
    # The environment of processes that torchrun has started
    "torchrun": "{fabric}.plugins.environments:TorchElasticEnvironment",
}
"""What each copy of Lightning has, and where; a package, a module or what is in one."""


class Namespace:
    """One copy of Lightning; it has an attribute for each of ``_PARTS``.

    Args:
        name: Its package.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, part: str) -> Any:
        if part not in _PARTS:
            raise AttributeError(part)
        path = _PARTS[part].format(package=self.name, fabric=_FABRIC[self.name])
        return resolve_name(path)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return namespace_of, (self.name,)

    def callback(self, **hooks: Any) -> Any:
        """A callback of this namespace with the given hooks; they get no ``self``."""
        members = {k: staticmethod(v) if callable(v) else v for k, v in hooks.items()}
        return type("PipelineCallback", (self.callbacks.Callback,), members)()


_NAMESPACES = {
    name: Namespace(name) for name in _FABRIC if find_spec(name.split(".", maxsplit=1)[0])
}


def installed_namespaces() -> tuple[Namespace, ...]:
    """The namespaces that are installed; the first one is that of strategies without a Trainer."""
    return tuple(_NAMESPACES.values())


def namespace_of(path: str) -> Namespace:
    """The namespace of a module such as ``lightning.pytorch.accelerators``; else the first.

    >>> namespace_of("pytorch_lightning.accelerators").name
    'pytorch_lightning'
    """
    found = (each for name, each in _NAMESPACES.items() if path.startswith(name))
    return next(found, installed_namespaces()[0])


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
