"""The two Lightning namespaces: ``lightning.pytorch`` and ``pytorch_lightning``.

They are separate copies of one code base, with separate registries; each refuses the other's
modules and strategies. This module is the only place that knows both.
"""

from __future__ import annotations

import importlib
from functools import cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from typing_extensions import override


class Namespace:
    """One copy of Lightning.

    Args:
        name: Its package.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def _module(self, path: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{path}")

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return namespace_of, (self.name,)  # modules that were imported don't travel

    @cached_property
    def strategies(self) -> ModuleType:
        """The package of strategies."""
        return self._module("strategies")

    @cached_property
    def launchers(self) -> Any:
        """The launchers, as submodules."""
        self._module("strategies.launchers.multiprocessing")
        self._module("strategies.launchers.subprocess_script")
        return self._module("strategies.launchers")

    @cached_property
    def callbacks(self) -> ModuleType:
        """The package of callbacks."""
        return self._module("callbacks")

    @cached_property
    def internal_names(self) -> frozenset[str]:
        """Attributes that every module has."""
        return frozenset(vars(self._module("core").LightningModule()))

    @property
    def _fabric(self) -> str:
        return "lightning.fabric" if self.name == "lightning.pytorch" else "lightning_fabric"

    @property
    def worker_launcher(self) -> type:
        """The launcher that starts functions."""
        found: type = self.launchers.multiprocessing._MultiProcessingLauncher  # noqa: SLF001
        return found

    @cached_property
    def torch_checkpoint_io(self) -> type:
        """How Lightning writes checkpoints."""
        found: type = importlib.import_module(
            f"{self._fabric}.plugins.io.torch_io"
        ).TorchCheckpointIO
        return found

    @cached_property
    def async_checkpoint_io(self) -> type:
        """The plugin with which the training goes on while a checkpoint is written."""
        found: type = self._module("plugins.io").AsyncCheckpointIO
        return found

    def callback(self, **hooks: Any) -> Any:
        """A callback of this namespace with the given hooks; they get no ``self``."""
        members = {k: staticmethod(v) if callable(v) else v for k, v in hooks.items()}
        return type("PipelineCallback", (self.callbacks.Callback,), members)()

    def interrupt(self, trainer: Any, exception: BaseException) -> None:
        """Tell callbacks, strategy and loggers that an exception ends the run."""
        self._module("trainer.call")._interrupt(trainer, exception)  # noqa: SLF001
        trainer._signal_connector.teardown()  # noqa: SLF001

    @property
    def sigterm_exception(self) -> type[SystemExit]:
        """What the loops raise after a SIGTERM."""
        found: type[SystemExit] = self._module("utilities.exceptions").SIGTERMException
        return found

    @property
    def rank_zero_only(self) -> Any:
        """The decorator that holds this process's rank."""
        return self._module("utilities.rank_zero").rank_zero_only

    def init_dist_connection(self, environment: Any, backend: str, **kwargs: Any) -> None:
        """Start the process group of all ranks."""
        module = importlib.import_module(f"{self._fabric}.utilities.distributed")
        module._init_dist_connection(environment, backend, **kwargs)  # noqa: SLF001

    def optimizers_to_device(self, optimizers: Any, device: Any) -> None:
        """Move what optimizers keep."""
        module = importlib.import_module(f"{self._fabric}.utilities.optimizer")
        module._optimizers_to_device(optimizers, device)  # noqa: SLF001

    def prediction_writers(self, trainer: Any) -> list[Any]:
        """The callbacks that write predictions."""
        kind = self.callbacks.BasePredictionWriter
        return [callback for callback in trainer.callbacks if isinstance(callback, kind)]


_NAMESPACES = {
    name: Namespace(name)
    for name in ("lightning.pytorch", "pytorch_lightning")
    if find_spec(name.split(".", maxsplit=1)[0])
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
