from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.profile import AtomProfile
from lightning_tspipe.profiling.atoms import profile_atoms
from tests.unit.networks.cutting import cut

RATE = 1e9


def estimate(
    network: nn.Module, inputs: torch.Tensor, sizes: tuple[int, ...] = (), *, trainable: bool = True
) -> list[AtomProfile]:
    program = cut(network, inputs)
    return profile_atoms(program, (inputs,), sizes, trainable=trainable, flops_per_second=RATE)


def test_a_network_on_meta_is_priced_by_its_operations() -> None:
    with torch.device("meta"):
        network = torchvision.models.resnet50()
        images = torch.empty(2, 3, 224, 224)
    records = estimate(network, images)
    # He et al., Deep Residual Learning, table 1: 3.8e9 multiply-adds; torchvision puts the stride
    # of a bottleneck into its second convolution, which makes it 4.1e9.
    assert sum(record.forward[1] for record in records) * RATE == pytest.approx(2 * 4.09e9, 0.01)
    assert sum(record.forward[2] for record in records) * RATE == pytest.approx(4 * 4.09e9, 0.01)
    held = sum(record.parameter_bytes for record in records)
    assert held == sum(t.nbytes for t in (*network.parameters(), *network.buffers()))
    assert all(record.output_bytes_per_sample > 0 for record in records)


def test_a_backward_is_two_forwards_and_its_halves_are_one_each() -> None:
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    first, between, last = estimate(network, torch.zeros(5, 8))
    assert first.forward == pytest.approx({1: 2 * 8 * 16 / RATE, 5: 5 * 2 * 8 * 16 / RATE})
    assert (first.input_backward[1], first.weight_backward[1]) == (0, first.forward[1])
    assert between.backward == {1: 0.0, 5: 0.0}
    assert last.input_backward == last.weight_backward == last.forward
    assert last.backward[5] == pytest.approx(2 * last.forward[5])
    assert last.activation_bytes_per_sample == 0  # the ReLU keeps what it passes on


def test_a_teacher_has_forwards_only() -> None:
    network = nn.Sequential(nn.Linear(8, 16)).requires_grad_(requires_grad=False)
    (record,) = estimate(network, torch.zeros(5, 8), trainable=False)
    assert record.forward[5] > 0
    assert not record.backward
    assert record.trainable_bytes == 0


def test_only_sizes_that_the_network_can_run() -> None:
    network = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to("meta")
    inputs = torch.empty(6, 8, device="meta")
    records = estimate(network, inputs, (1, 3, 6))
    assert {tuple(record.forward) for record in records} == {(3, 6)}
    assert records[0].forward == pytest.approx({3: 3 * 2 * 8 * 4 / RATE, 6: 6 * 2 * 8 * 4 / RATE})
    with pytest.raises(PartitionError, match="use larger batches"):
        estimate(network, inputs, (1,))
