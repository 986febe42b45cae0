"""A step without the batch's values: what is computed with meta tensors."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lightning_tspipe.replay.meta import MetaWins

CPU = torch.device("cpu")


def test_what_is_given_beside_meta_tensors_becomes_one() -> None:
    with MetaWins(CPU):
        made = torch.ones(2) + torch.ones(2, device="meta")
    assert made.is_meta


def test_a_copy_of_a_module_that_lies_partly_elsewhere_keeps_what_lies_here() -> None:
    """deepcopy gives each tensor all that has been copied before, meta tensors too."""
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2))
    with MetaWins(CPU):
        made = copy.deepcopy(module)
    copies = dict(made.state_dict(keep_vars=True))
    assert [name for name, tensor in copies.items() if tensor.is_meta] == ["0.weight", "0.bias"]
    assert copies["1.running_mean"] is not module.state_dict(keep_vars=True)["1.running_mean"]
