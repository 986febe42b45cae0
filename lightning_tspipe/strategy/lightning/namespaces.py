"""The two Lightning worlds: ``lightning.pytorch`` and ``pytorch_lightning``.

They are separate copies of one code base, with separate registries; each refuses the other's
modules and strategies. This module is the only place that knows both.
"""

from __future__ import annotations

import importlib
from functools import cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_tspipe.strategy.training.step_results import STAGES, StepSync

if TYPE_CHECKING:
    from lightning_tspipe.strategy.strategy import PipelineHooks

_NAMES = ("lightning.pytorch", "pytorch_lightning")


class World:
    """One Lightning world.

    Args:
        name: Its package.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def _module(self, path: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{path}")

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
        """A callback of this world with the given hooks; they get no ``self``."""
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
        """Start the world's process group."""
        module = importlib.import_module(f"{self._fabric}.utilities.distributed")
        module._init_dist_connection(environment, backend, **kwargs)  # noqa: SLF001

    def optimizers_to_device(self, optimizers: Any, device: Any) -> None:
        """Move what optimizers keep."""
        module = importlib.import_module(f"{self._fabric}.utilities.optimizer")
        module._optimizers_to_device(optimizers, device)  # noqa: SLF001

    def insert_metrics_sync(self, trainer: Any, strategy: PipelineHooks) -> None:
        """Have all ranks know the metrics before callbacks decide by them."""
        if any(getattr(callback, "is_metrics_sync", False) for callback in trainer.callbacks):
            return

        def share() -> None:
            _share_metrics(trainer, strategy)

        def share_if_due() -> None:
            if _compares_now(trainer):
                share()

        # Not a Checkpoint: users take those for ModelCheckpoints.
        sync = type(
            "MetricsSync",
            (self.callbacks.Callback,),
            {
                "is_metrics_sync": True,
                "on_train_batch_end": lambda self, *args: share_if_due(),  # noqa: ARG005
                "on_train_epoch_end": lambda self, *args: share(),  # noqa: ARG005
                "on_validation_end": lambda self, *args: share(),  # noqa: ARG005
                "on_test_end": lambda self, *args: share(),  # noqa: ARG005
            },
        )()
        kinds = (self.callbacks.Checkpoint, self.callbacks.EarlyStopping)

        def decides(callback: Any) -> bool:
            return isinstance(callback, kinds) or hasattr(callback, "decides_by_metrics")

        # Before each one, because callbacks between them may log; and for schedulers at the end.
        trainer.callbacks = [
            callback
            for known in trainer.callbacks
            for callback in ((sync, known) if decides(known) else (known,))
        ] + [sync]

    def prediction_writers(self, trainer: Any) -> list[Any]:
        """The callbacks that write predictions."""
        kind = self.callbacks.BasePredictionWriter
        return [callback for callback in trainer.callbacks if isinstance(callback, kind)]

    def insert_step_sync(self, trainer: Any, strategy: PipelineHooks) -> None:
        """Have the other ranks know what steps left and logged, before all other callbacks."""
        if any(hasattr(callback, "is_step_sync") for callback in trainer.callbacks):
            return

        def sync() -> StepSync:
            assert strategy.step_sync is not None
            return strategy.step_sync

        def starts(_self: Any, trainer: Any, _module: Any, batch: Any, *_args: Any) -> None:
            sync().batch_starts(trainer, batch)

        def ends(stage: str) -> Any:
            def epoch_ends(_self: Any, trainer: Any, _module: Any) -> None:
                sync().epoch_ends(stage, trainer)
                if stage != "predict":
                    _share_metrics(trainer, strategy)

            return epoch_ends

        hooks = {f"on_{stage}_batch_start": starts for stage in STAGES}
        hooks |= {f"on_{stage}_epoch_end": ends(stage) for stage in STAGES}
        base = self.callbacks.Callback
        trainer.callbacks.insert(0, type("StepSync", (base,), {"is_step_sync": True, **hooks})())


def _share_metrics(trainer: Any, strategy: PipelineHooks) -> None:
    """All ranks get the metrics of rank 0; of heads, those of the ranks that train them."""
    if strategy.heads_here.student is not None:
        strategy.heads_here.exchange()
        return
    metrics = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
    shared = strategy.broadcast(metrics)
    if not strategy.is_global_zero:
        trainer._logger_connector._callback_metrics.update(shared)  # noqa: SLF001


def _compares_now(trainer: Any) -> bool:
    """Whether metrics are going to be compared after this batch."""
    return any(_saves_within_epochs(callback, trainer) for callback in trainer.callbacks) or any(
        config.reduce_on_plateau and config.interval == "step"
        for config in trainer.lr_scheduler_configs
    )


def _saves_within_epochs(callback: Any, trainer: Any) -> bool:
    """Whether a checkpoint callback is one that compares metrics after this batch."""
    if getattr(callback, "monitor", None) is None:
        return False
    steps = getattr(callback, "_every_n_train_steps", 0)
    timed = getattr(callback, "_train_time_interval", None) is not None
    return timed or (steps > 0 and trainer.global_step % steps == 0)


def installed_worlds() -> tuple[World, ...]:
    """The worlds that are installed."""
    return tuple(_WORLDS.values())


_WORLDS = {name: World(name) for name in _NAMES if find_spec(name.split(".", maxsplit=1)[0])}


def world_of(strategy: Any) -> World:
    """The world whose Trainer uses a strategy."""
    world: World = type(strategy).world
    return world


def strategy_classes(hooks: type[PipelineHooks]) -> dict[str, Any]:
    """The strategy class, once for each world that it starts from, by the names of the classes.

    The accelerator is the first thing that a Trainer gives to its strategy: by it the strategy
    knows its world, and puts that world's base class first.
    """
    bases = {name: world.strategies.ParallelStrategy for name, world in _WORLDS.items()}
    variants: dict[str, type] = {}

    def set_accelerator(self: Any, accelerator: Any) -> None:
        origin = type(accelerator).__module__ if accelerator is not None else ""
        for name, variant in variants.items():
            if origin.startswith(name) and variant not in type(self).__mro__:
                self.__class__ = variant
        self._accelerator = accelerator

    accelerator = property(lambda self: self._accelerator, set_accelerator)
    for name, first in bases.items():
        order = (first, *(base for other, base in bases.items() if other != name))
        prefix = "" if not variants else name.title().replace("_", "").replace(".", "")
        variants[name] = type(
            f"{prefix}TSPipeStrategy",
            (hooks, *order),
            {
                "__doc__": hooks.__init__.__doc__,
                "__module__": hooks.__module__,
                "world": _WORLDS[name],
                "accelerator": accelerator,
            },
        )
    main, *others = variants.values()
    for variant in others:
        main.register(variant)  # type: ignore[attr-defined] # an ABC: isinstance() holds for all
    return {variant.__name__: variant for variant in variants.values()}
