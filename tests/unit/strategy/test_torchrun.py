"""What torchrun has started counts where the Trainer says nothing else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.strategy.lightning.torchrun import World, stages_for, started_world

CPU, CUDA = torch.device("cpu"), [torch.device("cuda", number) for number in range(4)]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what torchrun tells its workers."""

    def start(nodes: int, local: int, rank: int = 0) -> None:
        told = {
            "TORCHELASTIC_RUN_ID": "job", "GROUP_WORLD_SIZE": nodes, "LOCAL_WORLD_SIZE": local,
            "WORLD_SIZE": nodes * local, "RANK": rank, "LOCAL_RANK": rank % local,
            "GROUP_RANK": rank // local, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
        }  # fmt: skip
        for name, value in told.items():
            monkeypatch.setenv(name, str(value))

    return start


def strategy_of(trainer: dict[str, Any], **options: Any) -> Any:
    strategy = TSPipeStrategy(**options)
    Trainer(strategy=strategy, accelerator="cpu", logger=False, **trainer)
    return strategy


@pytest.mark.parametrize(
    "trainer", [{}, {"devices": "auto"}, {"devices": 3}, {"devices": 3, "num_nodes": 2}]
)
def test_the_world_of_torchrun_counts(trainer: dict[str, Any], start: Any) -> None:
    start(2, 3, rank=4)
    strategy = strategy_of(trainer)
    assert (strategy.total_ranks, strategy.num_ranks, strategy.num_nodes) == (6, 6, 2)
    assert (strategy.global_rank, strategy.local_rank, strategy.root_device) == (4, 1, CPU)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"devices": 2}, r"devices=2\), but torchrun has started 3 .* --nproc-per-node 2"),
        ({"num_nodes": 3}, r"num_nodes=3\), but torchrun has started 2. Leave"),
    ],
)
def test_numbers_that_contradict_it_are_refused(
    trainer: dict[str, Any], message: str, start: Any
) -> None:
    start(2, 3)
    with pytest.raises(ConfigurationError, match=message):
        strategy_of(trainer)


def test_there_are_fewer_replicas_first_and_then_other_pipelines(start: Any) -> None:
    """Each with the stages that were asked for at least, if there are as many devices."""
    expected = {8: (4, 2), 4: (4, 1), 6: (6, 1), 10: (5, 2), 3: (3, 1), 1: (1, 1)}
    for devices, found in expected.items():
        start(devices, 1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            strategy = strategy_of({}, num_stages=4)
        assert (strategy.num_ranks, strategy.num_replicas) == found
        assert any("num_stages=4 does not divide" in str(each.message) for each in told) == (
            devices % 4 > 0
        )


def test_devices_of_a_node() -> None:
    assert World(1, 2).devices(CUDA, 4, 1) == CUDA[:2]
    assert World(1, 8).devices(CUDA, 4, 2) == CUDA
    assert World(1, 4).devices(CUDA[1:3], 4, 2) == CUDA[1:3]
    for local, shared in ((8, 1), (5, 2), (2, 3)):
        with pytest.raises(ConfigurationError, match="Leave devices out, or give torchrun"):
            World(1, local).devices(CUDA, 4, shared)


def test_nodes_of_different_sizes_are_refused(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start(2, 2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigurationError, match="Give all of them the same --nproc-per-node"):
        started_world()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert started_world() is None


def test_every_rank_has_a_pipeline() -> None:
    for num_ranks in range(1, 40):
        for wanted in range(1, 12):
            stages = stages_for(num_ranks, wanted)
            assert num_ranks % stages == 0
            assert stages >= min(wanted, num_ranks)
