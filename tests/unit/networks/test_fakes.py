"""What is said of torch's operations on tensors without values is what they do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from lightning_tspipe.networks.fakes import Fakes


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_batch_normalisation(trains: bool, dtype: torch.dtype, order: torch.memory_format) -> None:
    given = torch.randn(4, 3, 5, 5, dtype=dtype).contiguous(memory_format=order)
    statistics = dtype if dtype is torch.float64 else torch.float32
    own = [torch.rand(3, dtype=statistics) for _ in range(4)]

    def run(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        x.requires_grad_()
        made = batch_norm(x, mean, var, weight, bias, training=trains)
        return [
            made,
            *torch.ops.aten.native_batch_norm(x, weight, bias, mean, var, trains, 0.1, 1e-5),
        ]

    real = run(given, *own)
    fake = Fakes(torch.device("cpu"))
    with fake:
        found = run(*map(fake.like, (given, *own)))
    for one, other in zip(found, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.requires_grad == other.requires_grad
