"""Pictures for the loggers that take them: TensorBoard's, W&B's, and those of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plots import as_pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def log_picture(trainer: Trainer, name: str, draw: Callable[[], Figure]) -> None:
    """Give a picture to all loggers that take some; global rank 0 does, the others return at once.

    Those are loggers with ``log_image(key, images, step)``, as ``WandbLogger`` has it, and those
    whose ``experiment`` has ``add_image``, as ``TensorBoardLogger``'s. Nothing is drawn where there
    is none. What can't be drawn or logged is said, and does not end the training.

    Args:
        trainer: The trainer.
        name: The picture's name in the loggers.
        draw: Makes it.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    takers = [(logger, take) for logger in trainer.loggers for take in [_taker(logger)] if take]
    if not takers:
        return
    try:
        pixels = as_pixels(draw())
    except ConfigurationError as error:  # such as without matplotlib
        rank_zero_info(f"{name}: no picture for the loggers: {error}")
        return
    for logger, take in takers:
        try:
            take(name, pixels, trainer.global_step)
        # Nobody asked this logger for pictures, so none of its errors is worth a training.
        except Exception as error:  # noqa: BLE001
            rank_zero_warn(
                f"{type(logger).__name__} took no picture {name!r}: {type(error).__name__}: {error}"
            )


def _taker(logger: Any) -> Callable[[str, Any, int], None] | None:
    """How a logger takes a picture (height, width, 3); None if it takes none."""
    if isinstance(logger, DummyLogger):  # would take anything, and keep nothing
        return None
    log_image = getattr(logger, "log_image", None)
    if callable(log_image):
        return lambda name, pixels, step: log_image(key=name, images=[pixels], step=step)
    add_image = getattr(getattr(logger, "experiment", None), "add_image", None)
    if callable(add_image):
        return lambda name, pixels, step: add_image(
            name, pixels, global_step=step, dataformats="HWC"
        )
    return None
