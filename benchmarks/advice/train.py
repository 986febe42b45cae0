"""One training by plain data parallelism, on two cores.

    python -m benchmarks.advice.train METHOD WORKLOAD FILE

Rank 0 writes the seconds of each step but the first into ``FILE``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchvision.models.resnet import BasicBlock
from torchvision.models.vision_transformer import EncoderBlock

from benchmarks.schedules.emulation import Clock
from benchmarks.throughput.workloads import WORKLOADS

BATCH = 64
"""Images of a batch of both processes together."""
BATCHES = 20
WARM_UP = 5
DEVICES = 2


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The layers that FSDP2 gathers one by one."""
    return (each for each in network.modules() if isinstance(each, BasicBlock | EncoderBlock))


def sharded(kind: type[LightningModule]) -> type[LightningModule]:
    """``kind`` with both networks sharded by FSDP2, block by block, as its guide has it."""

    class Sharded(kind):  # type: ignore[valid-type,misc]
        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for network in (self.student, self.teacher):
                for block in blocks(network):
                    fully_shard(block, mesh=mesh)
                fully_shard(network, mesh=mesh)

    return Sharded


def main() -> None:
    """Train, and write."""
    method, name, file = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    module = workload.module()
    strategy: Any = "ddp"
    if method == "fsdp2":
        module.__class__ = sharded(type(module))
        strategy = ModelParallelStrategy(data_parallel_size=DEVICES, tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=DEVICES, max_steps=BATCHES,
        callbacks=[Clock(1, Path(file))], max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    different: Any = workload.batches(BATCH // DEVICES, seed=0)
    batches: Any = [different[number % len(different)] for number in range(BATCHES)]
    trainer.fit(module, DataLoader(batches, batch_size=None, shuffle=False))


if __name__ == "__main__":
    main()
