"""Gradients travel in the order of memory in which they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.networks.checking import Entry, check
from lightning_tspipe.capture.plan import Specs, TensorSpec
from lightning_tspipe.runtime.stages.split_backward import arriving
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Channel
from tests.local_transport import LocalNetwork, LocalTransport
from tests.threads import run_on_threads

GRADIENT = Channel.STUDENT_GRADIENT


def on_two(*work: Callable[[Transport], Any]) -> list[Any]:
    network = LocalNetwork(2)
    return run_on_threads(lambda rank: work[rank](LocalTransport(network, rank)), 2, seconds=30)


def send(transport: Transport, specs: Specs, tensors: Sequence[Tensor]) -> None:
    relaid = transport.orders.tell(tensors, 1, (GRADIENT, specs))
    transport.send(relaid, 1, GRADIENT, specs)


def receive(transport: Transport, specs: Specs) -> list[Tensor]:
    received = transport.receive(specs, 0, GRADIENT).wait()
    return transport.orders.hear(received, 0, (GRADIENT, specs))


def test_they_arrive_as_they_were_made() -> None:
    plain, other = torch.arange(24.0).view(2, 3, 4), torch.arange(6.0).view(1, 2, 3)
    half = plain.transpose(1, 2).chunk(2, dim=1)[0]  # with gaps, which stay where it was made
    made = [plain.transpose(1, 2), plain, plain.permute(2, 0, 1), plain.select(1, 0), half]
    specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in made)
    others = (TensorSpec((1, 3, 2), torch.float32),)

    def one(transport: Transport) -> None:
        for _ in range(2):
            send(transport, specs, made)
        # Once in this order, always in it.
        send(transport, specs, [tensor.contiguous() for tensor in made])
        send(transport, others, [other.transpose(1, 2)])

    def two(transport: Transport) -> list[Any]:
        first, _ = receive(transport, specs), receive(transport, specs)
        return [first, receive(transport, specs), receive(transport, others)]

    first, later, (last,) = on_two(one, two)[1]
    for found in (first, later):
        for tensor, expected in zip(found, made, strict=True):
            assert torch.equal(tensor, expected)
            assert TensorSpec.of(tensor) == TensorSpec.of(expected)
    assert TensorSpec.of(last).order == (0, 2, 1)


def test_what_was_told_of_a_message_that_nobody_takes_is_kept() -> None:
    x = torch.arange(6.0).view(2, 3)
    first, second = ((TensorSpec((3, 2), torch.float32, flag),) for flag in (False, True))

    def one(transport: Transport) -> None:
        send(transport, first, [x.t()])
        send(transport, second, [x.view(3, 2)])

    def two(transport: Transport) -> list[Tensor]:
        transport.receive(first, 0, GRADIENT).wait()
        return receive(transport, second)

    (found,) = on_two(one, two)[1]
    assert torch.equal(found, x.view(3, 2))


@pytest.mark.parametrize("is_read", [True, False])
def test_a_leaf_s_gradient_is_kept_as_it_lies(is_read: bool) -> None:
    leaf = torch.randn(2, 3, requires_grad=True)
    with arriving([leaf, torch.zeros(2)]) as arrived:
        if is_read:
            leaf.t().backward(torch.ones(3, 2))
    assert leaf.grad is None
    assert arrived[1] is None
    assert (arrived[0] is not None) == is_read
    if arrived[0] is not None:
        assert arrived[0].stride() == (1, 2)
    leaf.sum().backward()
    assert leaf.grad is not None


class Block(nn.Module):
    """Scales what it adds, as CaiT does: the sum over a gradient depends on how it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.scale = nn.LayerNorm(32), nn.Linear(49, 49), nn.Linear(32, 32)
        self.gamma = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.scale(self.norm(x))
        return x + self.mix(x.transpose(1, 2)).transpose(1, 2)


def test_stages_are_equal_bit_by_bit() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(3)))

    def call(samples: int) -> Any:
        return (torch.randn(samples, 49, 32),), {}

    outcome = check(Entry(build, call), "blocks", (2, 3, 4, 100))
    assert outcome.exact
    assert outcome.atoms > 6
