"""Links between neighbours are measured over whatever carries the tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.runtime.transport.base import NOMINAL, Alone, Transport
from lightning_tspipe.runtime.transport.channels import Channel
from lightning_tspipe.strategy.setup.options import SetupOptions
from tests.local_transport import LocalNetwork, LocalTransport
from tests.strict import StrictNetwork
from tests.threads import run_on_threads

CPU = torch.device("cpu")


class Slow(LocalTransport):
    """One rank's messages take time, as over a link of 10 ms and 100 MB/s."""

    @override
    def send(
        self, tensors: Sequence[Tensor], target: int, channel: Channel, specs: Any = None
    ) -> None:
        if {self.rank, target} == {1, 2}:
            time.sleep(0.01 + sum(t.nbytes for t in tensors) / 1e8)
        super().send(tensors, target, channel, specs)


def measured(transport: Transport) -> Link:
    transport.measure_link(CPU)
    assert transport.link is not None
    return transport.link


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_all_ranks_find_the_same_over_ordered_wires(num_ranks: int) -> None:
    network = StrictNetwork(num_ranks, timeout=30)
    links = run_on_threads(lambda rank: measured(network.transport(rank)), num_ranks)
    assert len(set(links)) == 1
    assert 0 < links[0].latency < 1
    assert links[0].bandwidth > 0


def test_the_slowest_link_counts() -> None:
    network = LocalNetwork(4)
    links = run_on_threads(lambda rank: measured(Slow(network, rank)), 4)
    assert links[0].latency == pytest.approx(0.01, rel=0.5)
    assert links[0].bandwidth == pytest.approx(1e8, rel=0.5)


def test_plans_use_what_was_measured_unless_they_are_to_be_the_same_in_each_run() -> None:
    transport = Alone()
    assert SetupOptions().link(transport) == NOMINAL
    transport.link = Link(5e-6, 3e11)
    assert SetupOptions().link(transport) == Link(5e-6, 3e11)
    assert SetupOptions(costs="flops").link(transport) == NOMINAL
    assert str(transport.link) == "300 GB/s, 5 µs per message"
