"""Imported once, before ranks are forked."""

from __future__ import annotations

import lightly.transforms
import lightly.utils.lars
import lightning.pytorch
import lightning.pytorch.cli
import pytorch_lightning
import sklearn.datasets
import torch
import torch._subclasses.fake_tensor
import torch.fx
import torchvision

import lightning_tspipe
import tests.exactness.modules
import tests.exactness.reference
import tests.integration.trainings

__all__ = [
    "lightly",
    "lightning",
    "lightning_tspipe",
    "pytorch_lightning",
    "sklearn",
    "tests",
    "torch",
    "torchvision",
]
