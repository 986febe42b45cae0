"""lightly's example and benchmark modules as they stand, with small networks.

A file is run up to its classes: what it builds and trains at its end is left out. Constructors of
networks that take minutes on a CPU are replaced by ones with as many features and fewer layers, and
stochastic depth is off: what networks draw at random differs from rank to rank.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import lightning.pytorch
import torch
import torchvision
from lightning.pytorch import LightningModule
from timm.layers import DropPath
from torch import Tensor, nn

SIDE, SMALL = 64, 32
"""Pixels of large and of small views."""


_SMALL_VIT = {"img_size": SIDE, "patch_size": 8, "depth": 2}
_SMALL_HEAD = {"num_blocks": 2}  # with 12, AIM's has ten times the parameters of its ViT


def small(
    constructor: Callable[..., nn.Module], options: dict[str, int]
) -> Callable[..., nn.Module]:
    """A constructor of timm's, or of lightly, with two layers."""
    return lambda **arguments: constructor(**{**arguments, **options})


class SmallTorchvision(torchvision.models.VisionTransformer):  # type: ignore[misc]
    """torchvision's, with two layers for small images."""

    def __init__(self, **arguments: object) -> None:
        small = {"image_size": SIDE, "patch_size": 8, "num_layers": 2}
        given: dict[str, Any] = {**arguments, **small}
        super().__init__(**given)


def classes_in(file: Path) -> ModuleType:
    """A file's imports, functions and classes, as a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    module = ModuleType(f"lightly_{file.parent.name}_{file.stem}")
    sys.modules[module.__name__] = module
    # ``tspipe check`` trains in the other world.
    with mock.patch.dict(sys.modules, {"pytorch_lightning": lightning.pytorch}):
        exec(compile(tree, str(file), "exec"), vars(module))  # noqa: S102 - a file that was given
    return module


def built(file: Path) -> LightningModule:
    """The module of a file, with a seed of its own."""
    torch.manual_seed(0)
    space = classes_in(file)
    for name, kind in list(vars(space).items()):
        if name.startswith("vit_") or name == "MaskedCausalVisionTransformer":
            setattr(space, name, small(kind, _SMALL_VIT))
        elif name == "AIMPredictionHead":
            setattr(space, name, small(kind, _SMALL_HEAD))
    original = torchvision.models.VisionTransformer
    torchvision.models.VisionTransformer = SmallTorchvision
    found = [
        kind
        for kind in vars(space).values()
        if isinstance(kind, type)
        and kind.__module__ == space.__name__
        and hasattr(kind, "training_step")
    ]
    try:
        arguments: dict[str, Any] = {}
        if file.parent.parent.name == "benchmarks":
            arguments = {"batch_size_per_device": 4, "num_classes": 5}
        module: LightningModule = found[-1](**arguments)
    finally:
        torchvision.models.VisionTransformer = original
    vars(space)["model"] = module  # some steps call the global one
    for part in module.modules():
        if isinstance(part, DropPath):
            part.drop_prob = 0.0  # what networks draw differs from rank to rank
    return module


def batch(file: Path, seed: int, size: int = 4) -> tuple[object, ...]:
    """A batch as the method's transform makes it: views, labels, names."""
    generator = torch.Generator().manual_seed(seed)

    def views(number: int, side: int) -> list[Tensor]:
        return [torch.randn(size, 3, side, side, generator=generator) for _ in range(number)]

    multi_crop = file.stem in {"dino", "dinov2", "ibot", "msn", "pmsn"}
    made = views(2, SIDE) + (views(2, SMALL) if multi_crop else [])
    targets = torch.randint(5, (size,), generator=generator)
    return made, targets, [f"{n}.png" for n in range(size)]
