"""Predicted updates, against what optimizers do when gradients stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightly.utils.lars import LARS
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.weights.prediction import (
    check_momentum,
    check_predictable,
    predicted_update,
    remember_gradients,
)

Make = Callable[[Any], Optimizer]
STEADY = 400
"""Steps after which averages of a constant gradient have come to rest."""
KNOWN: dict[str, Make] = {
    "momentum": lambda p: SGD(p, lr=1e-4, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=1e-4, momentum=0.9, nesterov=True),
    "ascent": lambda p: SGD(p, lr=1e-4, momentum=0.9, maximize=True),
    "plain": lambda p: SGD(p, lr=1e-4),
    "plain ascent": lambda p: SGD(p, lr=1e-4, maximize=True),
    "adam": lambda p: Adam(p, lr=1e-4),
    "amsgrad": lambda p: Adam(p, lr=1e-4, amsgrad=True),
    "adam ascent": lambda p: Adam(p, lr=1e-4, maximize=True),
    "adamw": lambda p: AdamW(p, lr=1e-4, weight_decay=0.3),
    "rmsprop": lambda p: RMSprop(p, lr=1e-4, alpha=0.9),
    "rmsprop momentum": lambda p: RMSprop(p, lr=1e-4, alpha=0.9, momentum=0.5),
    "lars": lambda p: LARS(p, lr=1e-4, momentum=0.9),
}


def stepped(make: Make, num_steps: int) -> tuple[Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = make([parameter])
    for _ in range(num_steps):
        parameter.grad = torch.tensor([0.5, 1.0, -0.25], dtype=torch.float64)
        optimizer.step()
        remember_gradients(optimizer, [parameter])
    return optimizer, parameter


@pytest.mark.parametrize("name", KNOWN)
def test_a_constant_gradient_is_predicted(name: str) -> None:
    optimizer, parameter = stepped(KNOWN[name], STEADY)
    predicted = predicted_update(optimizer, parameter, optimizer.param_groups[0])
    before = parameter.detach().clone()
    optimizer.step()
    torch.testing.assert_close(predicted, before - parameter.detach(), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("name", KNOWN)
def test_nothing_is_predicted_before_the_first_step(name: str) -> None:
    optimizer, parameter = stepped(KNOWN[name], 0)
    assert predicted_update(optimizer, parameter, optimizer.param_groups[0]) is None


class Own(Adagrad):
    def predict_update(self, parameter: Tensor, group: Any) -> Tensor | None:
        return group["lr"] * torch.ones_like(parameter)


def test_an_optimizer_of_ones_own_says_it_itself() -> None:
    optimizer, parameter = stepped(lambda p: Own(p, lr=0.5), 1)
    check_predictable([optimizer])
    predicted = predicted_update(optimizer, parameter, optimizer.param_groups[0])
    assert predicted is not None
    assert predicted.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("make", [Adagrad, lambda p: LARS(p, lr=0.1)], ids=["Adagrad", "LARS"])
def test_others_are_refused_with_the_way_out(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="predict_update"):
        check_predictable([stepped(make, 0)[0]])


@pytest.mark.parametrize("name", ["plain", "adam", "lars"])
def test_spectrain_wants_momentum(name: str) -> None:
    with pytest.raises(ConfigurationError, match="pipeoptim"):
        check_momentum([stepped(KNOWN[name], 0)[0]])
    check_momentum([stepped(KNOWN["momentum"], 0)[0]])
