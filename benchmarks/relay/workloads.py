"""What is trained: the two applications, as the examples have them, on random pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))  # they import each other

from architecture_search import Search
from compression import Compression

WORKLOADS = ("compression", "nas")


def module(workload: str) -> Compression | Search:
    """A LightningModule of blocks."""
    torch.manual_seed(0)
    return Compression() if workload == "compression" else Search()


def batches(workload: str, batch_size: int, number: int) -> list[Any]:
    """Pictures of CIFAR's size that lie ready in memory."""
    random = torch.Generator().manual_seed(1)

    def pictures() -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (batch_size,), generator=random)
        return torch.randn(batch_size, 3, 32, 32, generator=random), labels

    if workload == "compression":
        return [pictures() for _ in range(number)]
    return [(pictures(), pictures()) for _ in range(number)]
