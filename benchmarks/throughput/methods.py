"""How it is trained: the methods that are compared, and what one process of each does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.fsdp import fully_shard

from benchmarks.crews.gate import Gate, GatedLoader
from benchmarks.crews.job import Job
from benchmarks.throughput.memory import count_at_step
from benchmarks.throughput.tiny import TINY, HalfOfTiny
from benchmarks.throughput.torch_gpipe import train_torch_gpipe
from benchmarks.throughput.workloads import WORKLOADS, Workload
from lightning_tspipe import TSPipeStrategy


def train(job: Job, connection: Connection) -> None:
    """Run one process of ``job``, for as long as the coordinator hands out tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate = Gate(connection)
    gate.listen()
    workload = {**WORKLOADS, TINY.name: TINY}[job.workload]
    METHODS[job.method](job, workload, gate)


def _plain(job: Job, workload: Workload, gate: Gate) -> None:
    _fit(job, workload, "auto", _loader(job, workload, gate))


def _alone(job: Job, workload: Workload, gate: Gate) -> None:
    """As if the other processes weren't there."""
    _plain(replace(job, num_ranks=1), workload, gate)


def _ddp(job: Job, workload: Workload, gate: Gate) -> None:
    _fit(job, workload, "ddp", _loader(job, workload, gate, split=True))


def _fsdp2(job: Job, workload: Workload, gate: Gate) -> None:
    def sharded() -> LightningModule:
        module = workload.module()
        module.__class__ = _sharded(type(module))
        return module

    strategy = ModelParallelStrategy(data_parallel_size=job.num_ranks, tensor_parallel_size=1)
    _fit(job, replace(workload, module=sharded), strategy, _loader(job, workload, gate, split=True))


def _tspipe(job: Job, workload: Workload, gate: Gate) -> None:
    options: dict[str, Any] = dict(job.options)
    strategy = TSPipeStrategy(**options)
    _fit(job, workload, strategy, _loader(job, workload, gate))


def _torch_gpipe(job: Job, workload: Workload, gate: Gate) -> None:
    loader = _loader(job, workload, gate)
    train_torch_gpipe(job, workload.module(), loader)


def _half(job: Job, workload: Workload, gate: Gate) -> None:
    half = replace(workload, module=HalfOfTiny)
    _fit(job, half, "auto", _loader(job, workload, gate))


METHODS: dict[str, Callable[[Job, Workload, Gate], None]] = {
    "plain": _plain,
    "alone": _alone,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "tspipe": _tspipe,
    "torch_gpipe": _torch_gpipe,
    "half": _half,
}


def _loader(job: Job, workload: Workload, gate: Gate, *, split: bool = False) -> GatedLoader:
    """The whole batch, or this rank's part of it."""
    size = job.batch_size // job.num_ranks if split else job.batch_size
    return GatedLoader(gate, workload.batches(size, seed=job.rank if split else 0))


def _fit(job: Job, workload: Workload, strategy: str | Strategy, loader: GatedLoader) -> None:
    module, gate = workload.module(), loader.gate
    count_at_step(module, lambda held: setattr(gate, "held", held))
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=job.num_ranks,
        accumulate_grad_batches=workload.window,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def _sharded(kind: type[LightningModule]) -> type[LightningModule]:
    """``kind`` with both networks sharded by FSDP2, as Lightning's guide has it.

    One group per network: between processes of one machine the number of collectives costs more
    than their overlap gains.
    """

    class Sharded(kind):  # type: ignore[valid-type,misc]
        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.student, mesh=mesh)
            fully_shard(self.teacher, mesh=mesh, reshard_after_forward=True)

    return Sharded
