"""Frozen layers that count what they compute."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_tspipe.caching import Boundary, Segment


class Layer:
    """A linear layer and a tanh in float64, row by row, so that each row's result is its own.

    Attributes:
        num_rows: Samples that went through it.
    """

    def __init__(self, num_inputs: int, num_outputs: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(num_outputs, num_inputs, generator=generator, dtype=torch.float64)
        self.num_rows = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        self.num_rows += len(inputs)
        return torch.stack([torch.tanh(self.weight @ row) for row in inputs])


def segments(*layers: Layer, dtype: torch.dtype | None = None) -> list[Segment]:
    return [Segment(Boundary(f"layer{n}", dtype=dtype), layer) for n, layer in enumerate(layers)]


def inputs(num: int = 24, width: int = 5) -> Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
