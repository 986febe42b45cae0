"""Whether networks draw, asked of their operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.stages.network import draws


class Function(nn.Module):
    """Dropout that no module tells of."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, training=self.training)


class Attention(nn.Module):
    """Attention as a function."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, None]
        return F.scaled_dot_product_attention(y, y, y, dropout_p=self.p)[:, 0]


class ByValue(nn.Module):
    """Can't be run without values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


def lstm(p: float) -> nn.Module:
    return nn.LSTM(8, 8, num_layers=2, dropout=p)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(4), nn.GELU()), False),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)).eval(), False),
        (Function(), True),
        (Function().eval(), False),
        (Attention(0.1), True),
        (Attention(0.0), False),
        (nn.MultiheadAttention(8, 2, 0.0, batch_first=True), False),
        (nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), False),
        (nn.TransformerEncoderLayer(8, 2, 8, 0.2, batch_first=True), True),
        (lstm(0.0), False),
        (lstm(0.5), True),
        (ByValue(), True),
    ],
)
def test_draws(network: nn.Module, expected: bool) -> None:
    before = torch.get_rng_state()

    def run(x: Tensor) -> object:
        return network(x, x, x) if isinstance(network, nn.MultiheadAttention) else network(x)

    assert draws(network.modules(), run, TensorSpec((3, 4, 8), torch.float32)) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(tensor.is_meta for tensor in network.parameters())
