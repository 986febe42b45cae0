"""BatchNorm over the samples of several ranks equals BatchNorm over all of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.ir.shares import share
from lightning_tspipe.runtime.modes.relay.batchnorm import shared_statistics
from lightning_tspipe.runtime.modes.relay.edges import StageGroup
from lightning_tspipe.runtime.transport.channels import Lane, edges_around
from tests.strict import StrictNetwork
from tests.threads import run_on_threads

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize(
    ("size", "momentum", "affine"), [(7, 0.1, True), (2, None, True), (5, 0.3, False)]
)
def test_equals_one_device(size: int, momentum: float | None, affine: bool) -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3, momentum=momentum, affine=affine).double()
    x, weights = (torch.randn(size, 3, 2, 2, dtype=torch.float64) for _ in range(2))
    whole, leaf = copy.deepcopy(layer), x.clone().requires_grad_()
    expected = whole(leaf)
    (expected * weights).sum().backward()
    copies = [copy.deepcopy(layer) for _ in range(3)]
    network = StrictNetwork(3, timeout=20)

    def work(unit: int) -> tuple[Tensor, Tensor]:
        transport = network.transport(unit)
        transport.open(edges_around((0, 1, 2), Lane.PROGRAM))
        group = StageGroup(transport, (0, 1, 2))
        start, stop = share(unit, 3, size)
        own = x[start:stop].clone().requires_grad_()
        with shared_statistics([copies[unit]], group.exchange):
            out = copies[unit](own)
        (out * weights[start:stop]).sum().backward()
        group.sum_gradients(list(copies[unit].parameters()))
        assert own.grad is not None
        return out.detach(), own.grad

    found = run_on_threads(work, 3, seconds=20)
    together = [torch.cat([found[unit][i] for unit in range(3)]) for i in range(2)]
    torch.testing.assert_close(together[0], expected.detach(), **CLOSE)
    torch.testing.assert_close(together[1], leaf.grad, **CLOSE)
    for one in copies:
        torch.testing.assert_close(one.state_dict(), whole.state_dict(), **CLOSE)
        for a, b in zip(one.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, **CLOSE)
