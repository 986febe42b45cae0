"""Where ranks that are threads compute: on the CPU, or on the GPU that the environment names."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

VARIABLE = "TSPIPE_TEST_DEVICE"
DEVICE = torch.device(os.environ.get(VARIABLE, "cpu"))
HOST = torch.device("cpu")


def on_device(value: Any) -> Any:
    """The tensors of a structure, where ranks compute."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), value)


def on_host(value: Any) -> Any:
    """The tensors of a structure in host memory, to be compared."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to(HOST), value)
