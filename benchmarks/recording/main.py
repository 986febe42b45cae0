"""What does recording a timeline cost?

    python benchmarks/recording/main.py [--steps 300] [--json FILE]

BYOL with a ResNet-18 trains over two processes; every other step is recorded as `PipelineTimeline`
records it. Neighbouring steps are compared, so that whatever else the machine does hits both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.environment import environment_of
from benchmarks.throughput.workloads import WORKLOADS
from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.callbacks.common import pipelined_of

BATCH_SIZE = 16
NUM_MICROBATCHES = 4
"""Small units, many actions: more is noted per second than in most trainings."""
WARMUP_STEPS = 10
PACKAGES = ("torch", "lightning", "lightly")


class EveryOtherStep(Callback):
    """Records steps 0, 2, 4, ... and notes how long each step takes."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        pipelined = pipelined_of(trainer)
        assert pipelined is not None
        self.starts.append(time.perf_counter())
        if batch_idx % 2 == 0:
            pipelined.record(1)


def main() -> int:
    """Train, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS["byol"]
    notes = EveryOtherStep()
    num_steps = WARMUP_STEPS + options.steps + 1
    trainer = Trainer(
        accelerator="cpu",
        strategy=TSPipeStrategy(num_microbatches=NUM_MICROBATCHES),
        devices=2,
        max_epochs=1,
        callbacks=[notes],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = TensorDataset(*workload.batches(BATCH_SIZE, seed=0)[0])
    trainer.fit(workload.module(), DataLoader(ConcatDataset([samples] * num_steps), BATCH_SIZE))
    if trainer.is_global_zero:
        figures = figures_of(notes.starts[WARMUP_STEPS:])
        for name, value in figures.items():
            print(f"{name:32} {value:.4f}")
        if options.json is not None:
            content = {"environment": environment_of(PACKAGES), "figures": figures}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def figures_of(starts: list[float]) -> dict[str, float]:
    """Compare every recorded step with the mean of the two that lie around it.

    Args:
        starts: When each step began, the first of them recorded.
    """
    seconds = [later - earlier for earlier, later in pairwise(starts)]
    ratios = [
        2 * seconds[n] / (seconds[n - 1] + seconds[n + 1]) for n in range(2, len(seconds) - 1, 2)
    ]
    low, _, high = quantiles(ratios, n=4)
    return {
        "recorded_over_not_recorded": median(ratios),
        "lower_quartile": low,
        "upper_quartile": high,
        # Of a median, as of normally distributed ratios.
        "standard_error": 1.253 * (high - low) / 1.349 / len(ratios) ** 0.5,
        "num_compared": float(len(ratios)),
        "step_ms": 1e3 * median(seconds),
    }


if __name__ == "__main__":
    sys.exit(main())
