"""``tspipe evaluate``: k-NN and linear classification on the frozen features of a checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_tspipe.callbacks.common import submodules
from lightning_tspipe.cli.exporting import read_part
from lightning_tspipe.cli.modules import call
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.evaluation import knn_evaluation, linear_evaluation

_NAME = "module_and_images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tspipe evaluate``."""
    parser.add_argument(
        "target",
        metavar="FILE.py[:FUNCTION]",
        help="returns a module, labelled images to train on, and labelled images to classify "
        f"(loaders or datasets); without a name, {_NAME}()",
    )
    parser.add_argument("--checkpoint", type=Path, help="weights: a file, or a folder of shards")
    parser.add_argument("--trust", action="store_true", help="read a checkpoint that may run code")
    parser.add_argument("--features", default="student", help="the submodule that gives features")
    parser.add_argument("--epochs", type=int, default=90, help="of the linear classifier; 0: none")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate per 256 samples")
    parser.add_argument("--k", type=int, default=20, help="neighbours of k-NN; 0: no k-NN")
    parser.add_argument("--temperature", type=float, default=0.07, help="of k-NN")
    parser.add_argument("--device", help="where to compute; by default a GPU if there is one")
    parser.add_argument("--json", type=Path, help="write the accuracies to a file")


def run(options: argparse.Namespace) -> None:
    """Evaluate, print and save the accuracies."""
    module, train, validation = _load(options.target)
    if options.checkpoint is not None:
        _restore(module, options.checkpoint, trust=options.trust)
    submodules(module, options.features, "--features")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    module.to(device)
    found: dict[str, float] = {}
    if options.k:
        found |= knn_evaluation(
            module, train, validation, options.features,
            k=options.k, temperature=options.temperature,
        )  # fmt: skip
    if options.epochs:
        found |= linear_evaluation(
            module, train, validation, options.features, epochs=options.epochs, lr=options.lr
        )
    for name, value in found.items():
        print(f"{name:<12} {value:7.2%}")  # noqa: T201 - the command's output
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


def _load(target: str) -> tuple[Any, Any, Any]:
    found = call(target, _NAME, "a module, images to train on and images to classify")
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], nn.Module)):
        raise ConfigurationError(
            f"{target} returned {type(found).__name__}: it must return a module, images to train "
            "on and images to classify"
        )
    return found


def _restore(module: nn.Module, path: Path, *, trust: bool) -> None:
    try:
        module.load_state_dict(read_part(path, trust=trust))
    except RuntimeError as error:  # torch's error for different names and shapes
        raise ConfigurationError(f"{path} belongs to another module: {error}") from error
