from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.unit.networks.cutting import cut


class Block(nn.Module):
    """Attention with one product for queries, keys and values, around it a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(attended.transpose(1, 2).flatten(2))


def test_attention_is_cut_between_its_products() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Block(), Block()).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    chain = cut(network, x)
    whole = network(x)
    whole.square().sum().backward()
    wanted = [
        parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None
    ]
    network.zero_grad()
    # Every atom as a stage of its own: what is passed on is sent, and its gradient comes back.
    received, passed, counts = [], [], []
    values: tuple[Tensor, ...] = (x,)
    for place in range(len(chain.atoms)):
        received.append(tuple(v.detach().clone().requires_grad_(place > 0) for v in values))
        values, _ = chain.run(received[-1], place, place + 1)
        passed.append(values)
        counts.append(len(values))
    # Before attention and before `proj`, the skipped value is passed on too.
    assert counts == [2, 2, 1, 2, 2, 1]
    assert torch.allclose(passed[-1][0], whole, rtol=1e-12)
    gradients: list[Tensor | None] = [2 * passed[-1][0].detach()]
    for made, got in zip(reversed(passed), reversed(received), strict=True):
        pairs = [
            (v, g)
            for v, g in zip(made, gradients, strict=True)
            if v.requires_grad and g is not None
        ]
        torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
        gradients = [tensor.grad for tensor in got]
    found = [parameter.grad for parameter in network.parameters()]
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert torch.allclose(one, other, rtol=1e-12)
