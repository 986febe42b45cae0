"""Load the user's module and data from a file, and measure one of its steps."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling import profile_step
from lightning_tspipe.strategy.strategy import TSPipeStrategy

DEFAULT_NAME = "module_and_data"

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


def load(target: str) -> tuple[LightningModule, Data]:
    """Call ``FILE.py:FUNCTION``, which returns a LightningModule and its training data.

    Args:
        target: The file, and the function if it is not called ``module_and_data``.

    Raises:
        ConfigurationError: There is no such file or function, or it returns something else.
    """
    found = call(
        target, DEFAULT_NAME, "the LightningModule and its training data (a DataLoader or a "
        "LightningDataModule)",
    )  # fmt: skip
    is_pair = isinstance(found, tuple) and len(found) == 2
    if not is_pair or not isinstance(found[0], LightningModule):
        raise ConfigurationError(
            f"{target} returned {type(found).__name__}: it must return a LightningModule "
            "and its training data"
        )
    module, data = found
    return module, data


def call(target: str, default: str, wanted: str) -> Any:  # noqa: ANN401 - as the user writes it
    """Call a function of a user's file.

    Args:
        target: ``FILE.py`` or ``FILE.py:FUNCTION``.
        default: Name of the function if none is given.
        wanted: What it should return, for the message.

    Raises:
        ConfigurationError: No such file or function.
    """
    path, _, name = target.partition(":")
    name = name or default
    function = getattr(_import(Path(path)), name, None)
    if not callable(function):
        raise ConfigurationError(
            f"{path} has no function {name}(); write one that returns {wanted}, or name another: "
            f"{path}:NAME"
        )
    return function()


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # As with `python FILE`, modules beside the file can be imported.
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def measure(  # noqa: PLR0913 - what to measure, where, and how
    module: LightningModule,
    data: Data,
    *,
    accelerator: str = "auto",
    student: list[str] | None = None,
    teacher: list[str] | None = None,
    flops_per_second: float | None = None,
) -> StepProfile:
    """Train one step on one device, and measure what its networks cost there.

    Args:
        module: The module to train.
        data: Its training data.
        accelerator: Accelerator to measure on.
        student: Names of the trained submodules.
        teacher: Names of the forward-only submodules.
        flops_per_second: Speed of a device that is not here, to calculate costs instead of
            measuring.

    Raises:
        CaptureError: The step cannot be captured.
        ConfigurationError: The networks are not found.
    """
    measured: list[StepProfile] = []
    strategy = TSPipeStrategy(student=student, teacher=teacher)

    class Measure(Callback):
        @override
        def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            engine = strategy.engine
            assert engine is not None
            measured.append(
                profile_step(
                    engine.captured,
                    strategy.root_device,
                    strategy.optimizers,
                    strategy.options.microbatch_counts,
                    flops_per_second,
                )
            )
            trainer.should_stop = True

    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=strategy,
        max_steps=1,
        callbacks=[Measure()],
        **QUIET,
    )
    trainer.fit(module, **data_arguments(data))
    if not measured:
        raise ConfigurationError("the training data has no batch: there is nothing to measure")
    return measured[0]


def measure_link(accelerator: str = "auto") -> Link | None:
    """Measure the link between two devices of this machine, as the start of a training does.

    Args:
        accelerator: Kind of devices.

    Returns:
        The link; None if there are not two devices.
    """
    strategy = TSPipeStrategy(num_stages=2, start_method="spawn")
    try:
        trainer = Trainer(accelerator=accelerator, devices=2, strategy=strategy, **QUIET)
    except MisconfigurationException:
        return None
    assert strategy.launcher is not None
    latency, bandwidth = strategy.launcher.launch(_link_of, trainer)
    return Link(latency, bandwidth)


def _link_of(trainer: Trainer) -> tuple[float, float]:
    """Measure the link, in each of the two processes."""
    strategy: Any = trainer.strategy
    strategy.setup_environment()
    latency, bandwidth = strategy.transport.link
    strategy.teardown()
    return latency, bandwidth


class Batches:
    """A loader of given batches; Lightning would take a list for several loaders."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = list(batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def data_arguments(data: Data) -> dict[str, Any]:
    """The data as arguments of ``Trainer.fit``."""
    if isinstance(data, LightningDataModule):
        return {"datamodule": data}
    if inspect.isgenerator(data) or isinstance(data, list | tuple):
        data = Batches(data)
    return {"train_dataloaders": data}
