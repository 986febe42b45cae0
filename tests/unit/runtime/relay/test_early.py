"""A block's backward runs right behind its forward, and its gradients come when they are due."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from lightning_tspipe.runtime.modes.relay.early_backwards import EarlyBackwards


def losses(blocks: nn.ModuleList, x: torch.Tensor) -> list[torch.Tensor]:
    return [block(x).square().mean() for block in blocks]


@pytest.mark.parametrize("known", [1.0, 0.25, 8.0])
def test_equals_one_backward_of_all(known: float) -> None:
    """Whatever the losses are multiplied by, and whether or not that was known."""
    torch.manual_seed(0)
    x, blocks = torch.randn(5, 3), nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 4)])
    (torch.stack(losses(blocks, x)).sum() * 0.25).backward()
    expected = [p.grad for p in blocks.parameters()]
    old = [torch.ones_like(p) for p in blocks.parameters()]
    for parameter, gradient in zip(blocks.parameters(), old, strict=True):
        parameter.grad = gradient.clone()
    early = EarlyBackwards(blocks.parameters())
    early.factor = lambda: known
    stand_ins = [early.run(loss) for loss in losses(blocks, x)]
    assert all(torch.equal(p.grad, g) for p, g in zip(blocks.parameters(), old, strict=True))
    (torch.stack(stand_ins).sum() * 0.25).backward()
    early.settle()
    for parameter, wanted in zip(blocks.parameters(), expected, strict=True):
        assert wanted is not None
        torch.testing.assert_close(parameter.grad, wanted + 1)


def test_activations_are_gone_afterwards() -> None:
    block = nn.Linear(3, 2)
    output = block(torch.randn(5, 3)).exp()
    kept = weakref.ref(output)
    early = EarlyBackwards(block.parameters())
    stand_in = early.run(output.mean())
    del output
    assert kept() is None
    assert stand_in.grad_fn is None
    assert block.weight.grad is None


def test_a_loss_that_trains_nothing() -> None:
    early = EarlyBackwards([])
    stand_in = early.run(torch.tensor(3.0))
    stand_in.backward()
    early.settle()
    assert float(stand_in.detach()) == 3.0


def test_a_backward_that_fails_leaves_gradients_alone() -> None:
    block = nn.Linear(2, 1)
    block.weight.grad = torch.ones(1, 2)
    early = EarlyBackwards(block.parameters())
    with pytest.raises(RuntimeError, match="scalar outputs"):
        early.run(block(torch.ones(3, 2)))
    assert torch.equal(block.weight.grad, torch.ones(1, 2))
