"""What blocks cost is measured once, told of, and kept for the next run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_tspipe import BlockwiseRelay
from lightning_tspipe.planning.relay import RelayProfile
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.modes.relay.blocks import BlockPair, pair_blocks
from lightning_tspipe.runtime.modes.relay.engine import NETWORKS
from lightning_tspipe.runtime.transport.base import Alone
from lightning_tspipe.strategy.setup.block_costs import BlockPlanner
from lightning_tspipe.strategy.setup.options import SetupOptions


class Module(nn.Module):
    def __init__(self, inside: int = 4) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval()
        first = nn.Sequential(nn.Linear(3, inside), nn.BatchNorm1d(inside), nn.Linear(inside, 3))
        self.student = nn.Sequential(first, nn.Linear(3, 2))

    def block_pairs(self, x: Tensor) -> tuple[BlockPair, ...]:
        return pair_blocks(self, x)

    def block_input(self, batch: Any, round_name: str) -> Tensor:
        return batch[0]  # type: ignore[no-any-return]

    def block_loss(self, out: Tensor, target: Tensor, block: int, batch: Any) -> Tensor:
        return mse_loss(out, target)


def profile(cache: Path | None, module: Module) -> RelayProfile:
    callback = BlockwiseRelay("ahd", profile_steps=2, profile_cache=cache)
    transport, device = Alone(), torch.device("cpu")
    here = Rank(module, NETWORKS, transport, device)
    optimizer = torch.optim.Adam(module.student.parameters())
    options = SetupOptions(costs="measured")
    planner = BlockPlanner(here, callback, options, (torch.zeros(7, 3),), [optimizer])
    return planner.profile((1, 2))


def test_costs_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with caplog.at_level(logging.INFO):
        found = profile(tmp_path, module)
    assert "measured block 1 of 2 (student.0), with [4, 7] samples" in caplog.text
    for name, value in module.state_dict().items():  # statistics of BatchNorm too
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in module.parameters())
    assert {n for b in found.blocks for n in b.teacher} == {4, 7}
    weights = sum(p.nbytes for p in module.student[1].parameters())
    assert found.blocks[1].gradient_bytes == weights
    # Both blocks' weights, gradients of two steps, and Adam's moments.
    assert found.blocks[1].state_bytes == 2 * weights + (2 + 2) * weights
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert profile(tmp_path, Module()) == found  # no two measurements give the same
    (file,) = tmp_path.glob("relay-*.json")
    assert f"costs of blocks are read from {file}" in caplog.text
    profile(tmp_path, Module(inside=5))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_can_not_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO):
        assert len(profile(tmp_path / "file", Module()).blocks) == 2
    assert "the measured costs were not saved" in caplog.text
    assert profile(None, Module()).batch_size == 7
