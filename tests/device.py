"""Where ranks compute: on the CPU, or on what the environment names.

``TSPIPE_TEST_DEVICE=cuda:0`` is for ranks that are threads, ``TSPIPE_TEST_SHARED=gpu`` for those of
a Trainer: all of them share one GPU, so that most tests of processes can run there.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_tspipe import TSPipeStrategy

VARIABLE = "TSPIPE_TEST_DEVICE"
SHARED = "TSPIPE_TEST_SHARED"
DEVICE = torch.device(os.environ.get(VARIABLE, "cpu"))
HOST = torch.device("cpu")


def on_device(value: Any) -> Any:
    """The tensors of a structure, where ranks compute."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), value)


def on_host(value: Any) -> Any:
    """The tensors of a structure in host memory, to be compared."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to(HOST), value)


def sharing(arguments: dict[str, Any]) -> dict[str, Any]:
    """A Trainer's arguments, where its ranks share a device: those for that; else as they are."""
    if SHARED not in os.environ:
        return arguments
    number, strategy = arguments.get("devices", 1), arguments.get("strategy", "auto")
    if strategy == "tspipe":
        strategy = TSPipeStrategy()
    if isinstance(strategy, TSPipeStrategy):
        number = max(number, strategy.options.ranks_per_device)
        strategy.options = replace(strategy.options, ranks_per_device=number)
    elif number > 1:
        return arguments  # another strategy, with several processes
    shared = {"accelerator": os.environ[SHARED], "devices": 1, "strategy": strategy}
    return {**arguments, **shared}
