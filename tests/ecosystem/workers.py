"""Ranks that Ray has not started, with what Ray would tell its workers: nodes need no machines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integration.trainings import Session, Trained, Training, strategy_of


@dataclass(frozen=True)
class Context:
    """A worker's place; the methods are those of ``ray.train.TrainContext``.

    Attributes:
        nodes: The node of each rank.
        rank: This one.
    """

    nodes: tuple[int, ...]
    rank: int

    def get_world_size(self) -> int:
        return len(self.nodes)

    def get_world_rank(self) -> int:
        return self.rank

    def get_node_rank(self) -> int:
        return self.nodes[self.rank]

    def get_local_world_size(self) -> int:
        return self.nodes.count(self.nodes[self.rank])

    def get_local_rank(self) -> int:
        return self.nodes[: self.rank].count(self.nodes[self.rank])


def train_as_worker(training: Training, nodes: tuple[int, ...]) -> tuple[Trained, dict[str, Any]]:
    """Train on one of the ranks; and what this rank knows of the others."""
    import ray.train  # noqa: PLC0415 - it takes seconds
    import ray.train.torch  # noqa: PLC0415
    from ray.train.lightning import RayLightningEnvironment  # noqa: PLC0415

    from lightning_tspipe.integrations.ray import (  # noqa: PLC0415
        RayTSPipeStrategy,
        prepare_trainer,
    )

    rank = int(os.environ["LOCAL_RANK"])
    context = Context(nodes, rank)
    ray.train.get_context = lambda: context
    ray.train.torch.get_device = lambda: torch.device("cpu")
    # As Ray does it, with a timeout of its own.
    dist.init_process_group(
        "gloo", rank=rank, world_size=len(nodes), timeout=timedelta(seconds=1800)
    )
    given = dist.group.WORLD
    module = Session(Training(strategy="auto", num_ranks=1)).module
    plain = strategy_of(training, module).options
    strategy = RayTSPipeStrategy(
        plain.student, plain.teacher, costs="flops", timeout=timedelta(seconds=60),
        **training.options,
    )  # fmt: skip
    trainer = {"strategy": strategy, "plugins": [RayLightningEnvironment()], "devices": "auto"}
    it = Session(training, **trainer)
    prepare_trainer(it.trainer)
    it.fit()
    refused = ""
    if training.options.get("save_distributed_checkpoint"):
        try:
            it.trainer.save_checkpoint(Path(f"own-{rank}") / "folder.ckpt")
        except Exception as error:  # noqa: BLE001 - told
            refused = f"{type(error).__name__}: {error}"
    return it.trained, {
        "group": dist.group.WORLD is not given,
        "transport": type(strategy.transport).__name__,
        "nodes": it.trainer.num_nodes,
        "devices": it.trainer.num_devices,
        "refused": refused,
    }
