"""Load the user's module and data from a file, and measure one of its steps."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections import UserList
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.overlap import Collectives
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling.steps import profile_step
from lightning_tspipe.runtime.transport import collectives
from lightning_tspipe.runtime.weights.ownership import beside_stages
from lightning_tspipe.strategy.strategy import TSPipeStrategy

T = TypeVar("T")

QUIET: dict[str, Any] = {
    "logger": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that only runs a few training steps."""

Data = Iterable[Any] | LightningDataModule
Batches = UserList[Any]
"""A loader of given batches; Lightning would take a list for several loaders."""


def load(target: str) -> tuple[LightningModule, Data]:
    """Call ``FILE.py:FUNCTION``, which returns a LightningModule and its training data.

    Args:
        target: The file, and the function if it is not called ``module_and_data``.

    Raises:
        ConfigurationError: There is no such file or function, or it returns something else.
    """
    module, data = call(
        target, "module_and_data", LightningModule,
        ("a LightningModule", "its training data (a DataLoader or a LightningDataModule)"),
    )  # fmt: skip
    return module, data


def call(target: str, default: str, kind: type, wanted: Sequence[str]) -> Sequence[Any]:
    """Call a function of a user's file.

    Args:
        target: ``FILE.py`` or ``FILE.py:FUNCTION``.
        default: Name of the function if none is given.
        kind: The type of the first thing that it returns.
        wanted: What all of them are, for messages.

    Raises:
        ConfigurationError: No such file or function, or it returns something else.
    """
    path, _, name = target.partition(":")
    name = name or default
    function = getattr(_import(Path(path)), name, None)
    what = f"{', '.join(wanted[:-1])} and {wanted[-1]}"
    if not callable(function):
        raise ConfigurationError(
            f"{path} has no function {name}(); write one that returns {what}, or name another: "
            f"{path}:NAME"
        )
    found = function()
    if not (isinstance(found, tuple) and len(found) == len(wanted) and isinstance(found[0], kind)):
        raise ConfigurationError(f"{target} returned {type(found).__name__}: it must return {what}")
    return cast("Sequence[Any]", found)


def read(path: Path) -> str:
    """The text of a file.

    Raises:
        ConfigurationError: There is no such file.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    return path.read_text(encoding="utf-8")


def _import(path: Path) -> ModuleType:
    read(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # As with `python FILE`, modules beside the file can be imported.
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def measure(
    module: LightningModule,
    data: Data,
    *,
    accelerator: str = "auto",
    flops_per_second: float | None = None,
    **options: Any,  # noqa: ANN401 - of the strategy
) -> StepProfile:
    """Train one step on one device, and measure what its networks cost there.

    Args:
        module: The module to train.
        data: Its training data.
        accelerator: Accelerator to measure on.
        flops_per_second: Speed of a device that is not here, to calculate costs instead of
            measuring.
        options: Of ``TSPipeStrategy``: the names of the networks.

    Raises:
        CaptureError: The step cannot be captured.
        ConfigurationError: The networks are not found.
    """
    strategy = TSPipeStrategy(**options)

    def profiled(*_: object) -> StepProfile:
        engine = strategy.engine
        assert engine is not None
        # What is calculated holds for any number of micro-batches.
        counts = strategy.options.microbatch_counts if flops_per_second is None else ()
        device, optimizers = strategy.root_device, strategy.optimizers
        ties = strategy.options.policy is None
        return profile_step(
            engine.captured, device, optimizers, counts, flops_per_second, ties=ties,
            beside=beside_stages(module, engine.captured),
        )  # fmt: skip

    return after_one_step(module, data, profiled, accelerator=accelerator, strategy=strategy)


def after_one_step(
    module: LightningModule,
    data: Data,
    measure: Callable[[Trainer, Any], T],
    **arguments: Any,  # noqa: ANN401 - of the Trainer
) -> T:
    """Train one step on one device, and measure something with the Trainer and the batch.

    Raises:
        ConfigurationError: The training data is empty.
    """
    found: list[T] = []

    def look(trainer: Trainer, _module: object, _outputs: object, batch: object, _: int) -> None:
        found.append(measure(trainer, batch))
        trainer.should_stop = True

    callback = LambdaCallback(on_train_batch_end=look)
    trainer = Trainer(devices=1, max_steps=1, callbacks=[callback], **QUIET, **arguments)
    trainer.fit(module, **data_arguments(data))
    if not found:
        raise ConfigurationError("the training data has no batch: there is nothing to measure")
    return found[0]


def measure_link(accelerator: str = "auto") -> Link | None:
    """Measure the link between two devices of this machine, as the start of a training does.

    Args:
        accelerator: Kind of devices.

    Returns:
        The link; None if there are not two devices.
    """
    found = _between_two(_link_of, accelerator)
    return None if found is None else Link(*found)


def _between_two(measure: Callable[[Trainer], T], accelerator: str) -> T | None:
    """What two processes measure, each on a device; None if there are not two devices."""
    strategy = TSPipeStrategy(num_stages=2, start_method="spawn")
    try:
        trainer = Trainer(accelerator=accelerator, devices=2, strategy=strategy, **QUIET)
    except MisconfigurationException:
        return None
    assert strategy.launcher is not None
    found: T = strategy.launcher.launch(measure, trainer)
    return found


def _link_of(trainer: Trainer) -> tuple[float, float]:
    """Measure the link, in each of the two processes."""
    strategy: Any = trainer.strategy
    strategy.setup_environment()
    latency, bandwidth = strategy.transport.link
    strategy.teardown()
    return latency, bandwidth


def measure_collectives(accelerator: str = "auto") -> Collectives | None:
    """Measure how fast two devices of this machine sum gradients, as DDP and FSDP2 do.

    Args:
        accelerator: Kind of devices.

    Returns:
        What is between the two; None if there are not two devices.
    """
    found = _between_two(_collectives_of, accelerator)
    if found is None:
        return None
    (summing, gathering, scattering), overlap = found
    return Collectives(2, Link(*summing), Link(*gathering), Link(*scattering), overlap)


def _collectives_of(trainer: Trainer) -> tuple[list[tuple[float, float]], float]:
    """Measure collectives, in each of the two processes: a launcher returns plain values."""
    torch.set_num_threads(1)
    strategy: Any = trainer.strategy
    strategy.setup_environment()
    found = collectives.measure_collectives(strategy.root_device)
    strategy.teardown()
    links = (found.all_reduce, found.all_gather, found.reduce_scatter)
    rounded = [[float(f"{number:.1e}") for number in each] for each in links]
    return [(latency, bandwidth) for latency, bandwidth in rounded], found.overlap


def data_arguments(data: Data) -> dict[str, Any]:
    """The data as arguments of ``Trainer.fit``."""
    if isinstance(data, LightningDataModule):
        return {"datamodule": data}
    if inspect.isgenerator(data) or isinstance(data, list | tuple):
        data = Batches(data)
    return {"train_dataloaders": data}
