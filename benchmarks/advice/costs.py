"""Measure what a step costs on one core, as ``tspipe plan`` does.

python -m benchmarks.advice.costs WORKLOAD FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.advice.train import BATCH
from benchmarks.throughput.workloads import WORKLOADS
from lightning_tspipe.cli.modules import Batches, measure


def main() -> None:
    """Measure, and write the profile."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload, file = WORKLOADS[sys.argv[1]], Path(sys.argv[2])
    batches = Batches(workload.batches(BATCH, seed=0))
    profile = measure(workload.module(), batches, accelerator="cpu")
    file.write_text(profile.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
