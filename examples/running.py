"""The command line that all examples share: Lightning's, and ``--fast``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

import lightning_tspipe  # noqa: F401 - registers strategy="tspipe"


def run(module: type[LightningModule], data: type[LightningDataModule]) -> None:
    """Run ``fit``, ``validate`` or ``test`` as the command line says.

    ``--fast`` stands for ``fit --config configs/EXAMPLE_fast.yaml``: what it changes can be read
    there, and changed by the arguments behind it.

    Args:
        module: What is trained.
        data: What on.
    """
    sys.argv[1:] = expanded(Path(sys.argv[0]), sys.argv[1:])  # the other ranks are started by it
    LightningCLI(module, data, seed_everything_default=0)


def expanded(script: Path, arguments: Sequence[str]) -> list[str]:
    """The arguments, without abbreviation.

    Args:
        script: The example's file.
        arguments: What stands behind its name.
    """
    if not arguments or arguments[0] != "--fast":
        return list(arguments)
    config = script.parent / "configs" / f"{script.stem}_fast.yaml"
    return ["fit", "--config", str(config), *arguments[1:]]
