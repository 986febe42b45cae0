"""Imported once, before ranks are forked."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

import lightning.pytorch
import lightning.pytorch.cli
import pytest
import pytorch_lightning
import torch
import torch._subclasses.fake_tensor
import torch.fx

import lightning_tspipe
import lightning_tspipe.callbacks.momentum_ema
import tests.exactness.modules
import tests.exactness.reference
import tests.integration.trainings
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.program import Program

with suppress(ImportError):  # a machine with a GPU may have little more than torch and Lightning
    import lightly.transforms
    import lightly.utils.lars
    import sklearn.datasets
    import torchvision

__all__ = [
    "lightly",
    "lightning",
    "lightning_tspipe",
    "pytest",
    "pytorch_lightning",
    "sklearn",
    "tests",
    "torch",
    "torchvision",
]

# What torch imports where sizes are symbolic for the first time takes half a second. But fake
# tensors begin to use CUDA where there is some, and a process forked from there can't use it then;
# asking torch whether there is some may begin it too.
if not Path("/dev/nvidiactl").exists():
    _network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 1, 1),
        torch.nn.BatchNorm2d(1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(1, 1),
    )
    Program(_network, "", Arguments.of((torch.zeros(2, 1, 1, 1),), {}))

# Ranks are forked from here: what is there already, no collection need look through.
gc.collect()
gc.freeze()
