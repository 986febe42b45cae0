"""Imported once, before ranks are forked."""

from __future__ import annotations

import lightly.utils.lars
import lightning.pytorch
import pytorch_lightning
import torch
import torch._subclasses.fake_tensor
import torch.fx

import lightning_tspipe
import tests.exactness.modules
import tests.exactness.reference
import tests.integration.trainings

__all__ = ["lightly", "lightning", "lightning_tspipe", "pytorch_lightning", "tests", "torch"]
