"""What is relayed is asked for early, and arrives in order whatever its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.modes.relay.edges import Inbox, Outbox
from lightning_tspipe.runtime.transport.base import Receipt
from lightning_tspipe.runtime.transport.channels import Channel
from tests.local_transport import LocalNetwork, LocalTransport

SIZES = (4, 4, 2, 4, 4)


class Noting(LocalTransport):
    """Notes what is sent and asked for."""

    def __init__(self, network: LocalNetwork, rank: int, notes: list[str]) -> None:
        super().__init__(network, rank)
        self._notes = notes

    @override
    def send(
        self, tensors: Sequence[Tensor], target: int, channel: Channel, specs: Any = None
    ) -> None:
        self._notes.append(f"send {len(tensors[0])}")
        super().send(tensors, target, channel, specs)

    @override
    def receive(self, specs: Sequence[TensorSpec], source: int, channel: Channel) -> Receipt:
        self._notes.append(f"ask {specs[0].shape[0]}")
        return super().receive(specs, source, channel)


def pair(*, early: bool) -> tuple[Inbox, Outbox, list[str]]:
    network = LocalNetwork(2, timeout=5)
    notes: list[str] = []
    inbox = Inbox(Noting(network, 1, notes), 0, early=early)
    return inbox, Outbox(Noting(network, 0, notes), 1, early=early), notes


@pytest.mark.parametrize("early", [True, False])
def test_all_arrive_in_order(early: bool) -> None:
    inbox, outbox, notes = pair(early=early)
    for number, size in enumerate(SIZES):
        spec = TensorSpec((size, 3), torch.float32)
        outbox.send(torch.full((size, 3), float(number)), spec)
        inbox.ask(spec)
        assert inbox.take().tolist() == [[number] * 3] * size
    outbox.settle()
    inbox.settle()
    # Nothing is left over, and nobody waits: what comes next is a message like the first.
    outbox.send(torch.ones(1, 3), TensorSpec((1, 3), torch.float32))
    inbox.ask(TensorSpec((1, 3), torch.float32))
    assert inbox.take().tolist() == [[1] * 3]
    fillers = notes.count("send 4") - SIZES.count(4)
    assert fillers == (2 if early else 0)  # when it became 2, and at the end


def test_the_next_message_is_asked_for_before_its_step() -> None:
    inbox, outbox, notes = pair(early=True)
    outbox.send(torch.zeros(4), TensorSpec((4,), torch.float32))
    inbox.ask(TensorSpec((4,), torch.float32))
    inbox.take()
    assert notes == ["send 4", "ask 4", "ask 4"]
    outbox.send(torch.zeros(4), TensorSpec((4,), torch.float32))
    inbox.ask(TensorSpec((4,), torch.float32))
    assert notes[3:] == ["send 4"]  # it has been asked for
