"""What a worker refuses; ``tests/ecosystem/test_ray.py`` has workers train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.errors import ConfigurationError
from tests.ecosystem.workers import Context

pytestmark = pytest.mark.slow  # they import Ray


def made(strategy: Any, **arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(strategy=strategy, **quiet, **arguments)


@pytest.fixture
def ray_strategy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, in a worker of four that are connected."""
    import ray.train  # noqa: PLC0415

    from lightning_tspipe.integrations import ray as module  # noqa: PLC0415

    monkeypatch.setattr(ray.train, "get_context", lambda: Context((0, 0, 1, 1), 2))
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    return module


def test_a_worker_is_a_rank(ray_strategy: Any) -> None:
    from ray.train.lightning import RayLightningEnvironment  # noqa: PLC0415

    strategy = ray_strategy.RayTSPipeStrategy(num_stages=2)
    trainer = made(strategy, plugins=[RayLightningEnvironment()], devices=7, num_nodes=9)
    assert ray_strategy.prepare_trainer(trainer) is trainer
    assert (trainer.num_nodes, trainer.num_devices, trainer.world_size) == (2, 2, 2)
    assert (strategy.global_rank, strategy.replica, strategy.pipeline_rank) == (2, 1, 0)
    assert trainer.strategy.launcher is None


def test_what_cant_be_a_worker_is_refused(ray_strategy: Any) -> None:
    from ray.train.lightning import RayLightningEnvironment  # noqa: PLC0415

    make, given = ray_strategy.RayTSPipeStrategy, {"plugins": [RayLightningEnvironment()]}
    for arguments, trainers, match in (
        ({}, {}, r"LightningEnvironment can't tell.*plugins=\[RayLightningEnvironment\(\)\]"),
        ({"start_method": "spawn"}, given, "start_method='spawn': Ray starts"),
        ({"num_stages": 3}, given, r"num_stages=3: 4 workers.*ScalingConfig\(num_workers"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            made(make(**arguments), **trainers)


def test_workers_that_are_not_connected_are_refused(
    ray_strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.train.lightning import RayLightningEnvironment  # noqa: PLC0415

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ConfigurationError, match=r"connected.*TorchTrainer"):
        made(ray_strategy.RayTSPipeStrategy(), plugins=[RayLightningEnvironment()])


def test_outside_of_workers_it_is_said_where_they_are() -> None:
    from lightning_tspipe.integrations.ray import RayTSPipeStrategy  # noqa: PLC0415

    with pytest.raises(ConfigurationError, match=r"in the function that .*TorchTrainer gets"):
        made(RayTSPipeStrategy())


def test_other_strategies_are_for_rays_own_function(ray_strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match="Use RayTSPipeStrategy"):
        ray_strategy.prepare_trainer(made(TSPipeStrategy(), accelerator="cpu", devices=1))
    with pytest.raises(RuntimeError, match="Invalid strategy class"):
        ray_strategy.prepare_trainer(made("auto", accelerator="cpu", devices=1))
