from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.profiling.atoms import profile_atoms
from tests.unit.networks.cutting import cut


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_times_at_every_size_and_for_both_halves() -> None:
    profiles = profile_atoms(
        cut(perceptron(), torch.randn(4, 4)),
        (torch.randn(8, 4),),
        [2, 8],
        trainable=True,
        repeats=1,
    )
    assert [profile.name for profile in profiles] == ["0", "1", "2"]
    for profile in profiles:
        for times in (profile.forward, profile.backward, profile.input_backward):
            assert set(times) == {2, 8}
            assert all(seconds > 0 for seconds in times.values())
    weights = [profile.weight_backward[8] for profile in profiles]
    assert weights[:2] == [0.0, 0.0]  # nobody waits for the first atom's input half
    assert weights[2] > 0


def test_bytes() -> None:
    network = perceptron()
    network[2].bias.requires_grad_(False)
    profiles = profile_atoms(
        cut(network, torch.randn(4, 4)), (torch.randn(8, 4),), [4], trainable=True, repeats=0
    )
    assert [p.output_bytes_per_sample for p in profiles] == [32, 32, 8]
    # The batch, and what ReLU made, which the second product keeps too; no parameters.
    assert [p.activation_bytes_per_sample for p in profiles] == [16, 32, 0]
    assert [p.parameter_bytes for p in profiles] == [160, 0, 72]
    assert [p.trainable_bytes for p in profiles] == [160, 0, 64]
    assert [p.result_bytes_per_sample for p in profiles] == [0, 0, 8]


@pytest.mark.parametrize("priced", [None, 1e9], ids=["measured", "priced"])
@pytest.mark.parametrize("lies", ["cpu", "meta"])
def test_bytes_in_mixed_precision(lies: str, priced: float | None) -> None:
    """What lies elsewhere, or is priced, is weighed as the device would compute it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = cut(perceptron().to(lies), torch.randn(4, 4))
        profiles = profile_atoms(
            program, (torch.randn(8, 4),), [4], trainable=True, repeats=0, flops_per_second=priced
        )
    assert [p.output_bytes_per_sample for p in profiles] == [16, 16, 4]
    # The batch, what ReLU made, and with it the weight, all as they were cast.
    assert [p.activation_bytes_per_sample for p in profiles] == [8, 16, 8]


def test_the_network_stays_as_it_is() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    network[0].weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(network.state_dict())
    state = torch.get_rng_state()
    inputs = torch.randn(6, 4)
    torch.set_rng_state(state)
    kept = inputs.clone()
    profile_atoms(cut(network, inputs), (inputs,), [3, 6], trainable=True, repeats=1)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(inputs, kept)
    grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    assert list(grads) == ["0.weight"]
    assert torch.equal(grads["0.weight"], torch.ones(4, 4))


def test_sizes_that_batchnorm_refuses_are_left_out() -> None:
    program = cut(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4, 4))
    profiles = profile_atoms(program, (torch.randn(4, 4),), [1, 2, 4], trainable=True, repeats=1)
    assert [set(profile.forward) for profile in profiles] == [{2, 4}, {2, 4}]
    with pytest.raises(PartitionError, match="larger batches"):
        profile_atoms(program, (torch.randn(1, 4),), [1], trainable=True)


def test_out_of_time_each_size_is_still_measured_once() -> None:
    profiles = profile_atoms(
        cut(perceptron(), torch.randn(4, 4)),
        (torch.randn(8, 4),),
        [2, 8],
        trainable=True,
        repeats=3,
        max_seconds=0.0,
    )
    assert set(profiles[0].forward) == {2, 8}


def test_a_frozen_beginning_has_no_backward() -> None:
    network = perceptron()
    network[0].requires_grad_(False)
    profiles = profile_atoms(
        cut(network, torch.randn(4, 4)), (torch.randn(4, 4),), [4], trainable=True, repeats=0
    )
    assert profiles[0].activation_bytes_per_sample == 0
    assert profiles[2].activation_bytes_per_sample > 0


@pytest.mark.parametrize(("lies", "runs"), [("meta", "cpu"), ("cpu", "meta")])
def test_an_atom_is_measured_on_a_device_where_the_network_is_not(lies: str, runs: str) -> None:
    """Without values, and as before the first batch on a GPU, for which meta stands here."""
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(lies)
    before = dict(network.state_dict(keep_vars=True))
    values = copy.deepcopy(network.state_dict())
    inputs = torch.randn(4, 4).to(runs)
    profiles = profile_atoms(cut(network, inputs), (inputs,), [2, 4], trainable=True, repeats=0)
    assert all(profile.backward[4] > 0 for profile in profiles)
    assert [profile.parameter_bytes for profile in profiles] == [160, 136, 72]
    after = network.state_dict(keep_vars=True)
    assert all(tensor is before[name] for name, tensor in after.items())
    assert all(tensor.grad is None for tensor in after.values())
    if lies == "cpu":
        torch.testing.assert_close(network.state_dict(), values, rtol=0, atol=0)
