"""What each process does: an ordinary Trainer, real blocks or blocks that sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.crews.gate import Gate, GatedLoader
from benchmarks.crews.job import Job
from benchmarks.relay.sleeping import Sleeping
from benchmarks.relay.workloads import batches, module
from lightning_tspipe import BlockwiseRelay

BATCHES_PER_EPOCH = 24


@dataclass(frozen=True, slots=True)
class Epochs(GatedLoader):
    """Epochs of a few batches: their ends, where all ranks meet, count too."""

    def __len__(self) -> int:
        return BATCHES_PER_EPOCH


def train(job: Job, connection: Connection) -> None:
    """Run one rank, for as long as the coordinator hands out tokens."""
    torch.set_num_threads(1)
    options = dict(job.options)
    gate = Gate(connection)
    gate.listen()
    data: Sequence[Any]
    made: LightningModule
    if job.workload in {"compression", "nas"}:
        made = module(job.workload)
        data = batches(job.workload, job.batch_size, BATCHES_PER_EPOCH)
    else:
        made = Sleeping(Path(str(options["profile"])), float(options["load"]))
        data = [(torch.zeros(job.batch_size, 1),)] * BATCHES_PER_EPOCH
    trainer = Trainer(
        accelerator="cpu",
        strategy="tspipe" if job.num_ranks > 1 else "auto",
        devices=job.num_ranks,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[relay(options, job.method), *counted(options)],
    )
    trainer.fit(made, Epochs(gate, data))


def relay(options: dict[str, Any], method: str) -> BlockwiseRelay:
    """The callback of a method; each device of a baseline normalises by its own samples."""
    by_hand = method not in {"dp", "ir"}
    partition, widths = (
        [int(n) for n in str(options[name]).split()] if by_hand and name in options else None
        for name in ("partition", "widths")
    )
    return BlockwiseRelay(
        method,  # type: ignore[arg-type] # a mode
        partition=partition,
        widths=widths,
        sync_batchnorm="auto" if method in {"ahd", "ir"} else False,
        profile_steps=int(options.get("profile_steps", 1)),
        profile_cache=str(options["cache"]) if "cache" in options else None,
    )


def counted(options: dict[str, Any]) -> list[Any]:
    """Writes what the ranks have counted, if that is wanted."""
    if "counts" not in options:
        return []
    from benchmarks.relay.counting import Counts  # noqa: PLC0415

    return [Counts(Path(str(options["counts"])))]
