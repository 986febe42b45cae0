"""The same function under a plain Trainer and under the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.exactness.modules import images, labels
from tests.integration.jobs import run
from tests.integration.trainings import Epochs, Training


def alone(training: Training) -> Training:
    """The same on one device, without this project's strategy."""
    return replace(training, strategy="auto", num_ranks=1, options={})


def both(
    function: Callable[..., Any], training: Training, folder: Path, num_ranks: int = 2
) -> tuple[Any, list[Any]]:
    """The function's values on one device, and on each rank of the pipeline."""
    expected = run(function, alone(training), num_ranks=1, folder=folder / "alone")[0]
    piped = replace(training, num_ranks=num_ranks)
    return expected, run(function, piped, num_ranks=num_ranks, folder=folder / "together")


def labelled(first: int, num_batches: int = 3, size: int = 5) -> Epochs:
    """A loader of images and labels; the last batch is smaller."""
    sizes = [size] * (num_batches - 1) + [size - 2]
    seeds = range(first, first + num_batches)
    return Epochs([[(images(n, s), labels(n, s)) for n, s in zip(sizes, seeds, strict=True)]])
