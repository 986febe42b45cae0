"""``tspipe evaluate``: k-NN and linear classification on the frozen features of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_tspipe.callbacks.common import submodules
from lightning_tspipe.cli.exporting import read_part
from lightning_tspipe.cli.modules import call
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.evaluation import knn_evaluation, linear_evaluation

_NAME = "module_and_images"


@dataclass(frozen=True)
class Options:
    """Options of ``tspipe evaluate``.

    Attributes:
        target: FILE.py[:FUNCTION] that returns a module, labelled images to train on, and labelled
            images to classify (loaders or datasets); without a name, module_and_images()
        checkpoint: weights: a file, or a folder of shards
        trust: read a checkpoint that may run code
        features: the submodule that gives features
        epochs: of the linear classifier; 0: none
        lr: learning rate per 256 samples
        k: neighbours of k-NN; 0: no k-NN
        temperature: of k-NN
        device: where to compute; by default a GPU if there is one
        json: write the accuracies to a file
    """

    target: str
    checkpoint: Path | None = None
    trust: bool = False
    features: str = "student"
    epochs: int = 90
    lr: float = 0.1
    k: int = 20
    temperature: float = 0.07
    device: str | None = None
    json: Path | None = None


def run(options: Options) -> None:
    """Evaluate, print and save the accuracies."""
    module, train, validation = call(
        options.target, _NAME, nn.Module, ("a module", "images to train on", "images to classify")
    )
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


def _restore(module: nn.Module, path: Path, *, trust: bool) -> None:
    try:
        module.load_state_dict(read_part(path, trust=trust))
    except RuntimeError as error:  # torch's error for different names and shapes
        raise ConfigurationError(f"{path} belongs to another module: {error}") from error
