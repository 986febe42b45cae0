"""One rank's versions: what is refused, by name, and what autograd saves in their place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.weights.policies import policy_of
from lightning_tspipe.runtime.weights.saved_tensors import Held, Saved, Token, recording, repeating
from lightning_tspipe.runtime.weights.versions import StageWeights


def made(module: nn.Module, policy: str = "pipeoptim") -> StageWeights:
    """Of stage 0 of 2."""
    weights = StageWeights(policy_of(policy), 1, 2, module, list(module.parameters()))
    weights.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)]
    return weights


def step(module: nn.Module, weights: StageWeights, batch: int) -> None:
    """The forward of the next batch, then backward and update of this one; only the last counts."""
    with weights.forward(batch + 1, 1):
        module(torch.ones(1, 2))
    weights.position = batch
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    weights.keep()
    weights.optimizers[0].step()
    weights.updated()


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.mul_(0.5),
        lambda weight: setattr(weight, "data", weight.data * 0.5),
        lambda weight: weight.detach().zero_(),
    ],
    ids=["data in place", "data", "in place"],
)
def test_a_weight_that_changes_between_two_updates_is_named(change: Callable[..., object]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weights = made(module)
    step(module, weights, 0)
    change(module[1].weight)
    refused = pytest.raises(
        ConfigurationError, match=r"'1\.weight' was changed between two updates"
    )
    with ExitStack() as stack:
        stack.enter_context(refused)
        step(module, weights, 1)
        weights.drain()  # of values, the device tells later


def test_where_an_epoch_begins_weights_may_change() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    weights = made(module)
    step(module, weights, 0)
    weights.drain()
    module[0].weight.data.mul_(0.5)
    step(module, weights, 1)
    step(module, weights, 2)


def test_an_lstm_does_not_hold_on_to_a_prediction() -> None:
    module = nn.LSTM(2, 2)
    weights = made(module)
    for batch in range(3):
        step(module, weights, batch)
        assert all(
            mine is held
            for mine, held in zip(module.parameters(), module._flat_weights, strict=True)
        )


def test_a_prediction_that_is_not_finite_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weights = made(module)
    step(module, weights, 0)
    (bias,) = (p for name, p in module.named_parameters() if name == "1.bias")
    weights.optimizers[0].state[bias]["momentum_buffer"].fill_(float("nan"))
    with pytest.raises(ConfigurationError, match=r"'1\.bias' by 1 updates is not finite"):
        step(module, weights, 1)


def test_a_sparse_gradient_is_named() -> None:
    module = nn.Embedding(3, 2, sparse=True)
    weights = made(module, "pipedream")
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="'weight' has a sparse gradient"):
        weights.keep()


def test_weights_that_share_memory_have_tokens_of_their_own() -> None:
    """As an LSTM's do on a GPU."""
    flat = torch.arange(10.0)
    values = [flat[:6].view(2, 3), flat[6:].view(2, 2)]
    saved = Saved()
    pack = recording(values, saved)
    # The other version lies elsewhere in its memory, as another flat copy would.
    shared = torch.tensor([9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0])
    other = [torch.zeros(2, 3), shared[3:].view(2, 2)]
    token = pack(values[1].t())
    assert isinstance(token, Token)
    assert token.of(other).tolist() == [[1.0, 3.0], [2.0, 4.0]]
    last = pack(values[1][1:, 1:])
    assert isinstance(last, Token)
    assert last.of(other).tolist() == [[4.0]]
    assert isinstance(pack(torch.ones(2)), Held)
    assert isinstance(pack(values[0][2:]), Held)  # nothing of it, at the place of the next


def test_a_forward_that_saves_something_else_is_refused() -> None:
    saved, tensor = Saved(), torch.ones(2, 3)
    pack = recording([], saved)
    held = [pack(tensor), pack(tensor)]
    written = saved.written()
    tensor.zero_()
    assert torch.equal(written[0], torch.ones(2, 3))
    assert written[0] is written[1]
    refused = partial(pytest.raises, ConfigurationError, match="saved different tensors")
    with refused(), repeating(written, Saved()) as again:
        again(torch.ones(3))
    with refused(), repeating([[0, [2, 3], [3, 1], 0]], Saved()) as again:  # a token
        again(torch.ones(3))
    with refused(), repeating(written, Saved()):
        pass
    del held
    assert saved.written() == [None, None]
