"""How the next updates will change a parameter, from what its optimizer knows.

An optimizer keeps a smoothed gradient, which changes slowly: the next step will be about what that
alone gives. So the weights after s more steps are about ``W - s * update`` (Chen et al., SpecTrain,
2018; Guan et al., *PipeOptim*, 2023). With the learning rate in force, g the last gradient, v the
momentum buffer, m and n Adam's averages, corrected for the steps that were completed:

==========================  =====================================
SGD, also with Nesterov     lr * v
SGD without momentum        lr * (g + decay * W)
Adam                        lr * m / (sqrt(n) + eps)
AdamW                       lr * (m / (sqrt(n) + eps) + decay * W)
RMSprop                     lr * v, or lr * g / (sqrt(n) + eps)
LARS (lightly's)            lr * v
==========================  =====================================

A last gradient is none that an optimizer keeps; :func:`remember_gradients` puts it into its state,
where checkpoints find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_tspipe.errors import ConfigurationError

_LAST = "last_gradient"

Group = Mapping[str, Any]
State = Mapping[str, Any]
Rule = Callable[[Tensor, State, Group], Tensor | None]


@runtime_checkable
class PredictsUpdate(Protocol):
    """What an optimizer of your own has, so that its weights can be predicted.

    Example:
        >>> class Signed(torch.optim.SGD):
        ...     def predict_update(self, parameter, group):
        ...         state = self.state.get(parameter)
        ...         return None if not state else group["lr"] * state["momentum_buffer"].sign()
        >>> issubclass(Signed, PredictsUpdate)
        True
    """

    def predict_update(self, parameter: Tensor, group: Group) -> Tensor | None:
        """What the next ``step`` is expected to subtract, as far as the state tells.

        Args:
            parameter: One of the optimizer's.
            group: Its group.

        Returns:
            A tensor of the parameter's shape; None before the first step.
        """


def check_predictable(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers whose updates nobody can predict.

    Raises:
        ConfigurationError: Says how to teach it.
    """
    for optimizer in optimizers:
        if _rule_of(optimizer) is None:
            raise ConfigurationError(
                f"{type(optimizer).__name__}: it is not known how to predict its updates. Give it "
                "a method predict_update(parameter, group) (see lightning_tspipe.PredictsUpdate), "
                "or use weights='pipedream' or '2bw', which predict nothing"
            )


def check_momentum(optimizers: Iterable[Optimizer]) -> None:
    """Refuse all but SGD with momentum, for which alone SpecTrain is defined.

    Raises:
        ConfigurationError: Another one.
    """
    for optimizer in optimizers:
        if type(optimizer) is not SGD or not all(g["momentum"] for g in optimizer.param_groups):
            raise ConfigurationError(
                f"weights='spectrain' predicts by the momentum of SGD, and this is "
                f"{type(optimizer).__name__}. Use torch.optim.SGD(..., momentum=...), or "
                "weights='pipeoptim', which knows other optimizers"
            )


def predicted_update(optimizer: Optimizer, parameter: Tensor, group: Group) -> Tensor | None:
    """What the next step of an optimizer is expected to subtract from a parameter.

    Returns:
        None before the first step.
    """
    if isinstance(optimizer, PredictsUpdate):
        return optimizer.predict_update(parameter, group)
    rule = _rule_of(optimizer)
    assert rule is not None, "check_predictable comes first"
    state = optimizer.state.get(parameter)
    return rule(parameter.detach(), state, group) if state else None


def remember_gradients(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """After a step: keep the gradients, if predicting the optimizer's next step needs them."""
    if type(optimizer) not in {SGD, RMSprop}:
        return
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for parameter in parameters:
        group = groups.get(id(parameter))
        if group is not None and not group["momentum"] and parameter.grad is not None:
            optimizer.state[parameter][_LAST] = parameter.grad.detach().clone()


def _rule_of(optimizer: Optimizer) -> Rule | Callable[..., Any] | None:
    if isinstance(optimizer, PredictsUpdate):
        return optimizer.predict_update
    kind = type(optimizer)
    if kind.__name__ == "LARS" and kind.__module__.startswith("lightly."):
        return _momentum if all(g["momentum"] for g in optimizer.param_groups) else None
    return _RULES.get(kind)


def _momentum(parameter: Tensor, state: State, group: Group) -> Tensor | None:  # noqa: ARG001
    buffer = state.get("momentum_buffer")
    return None if buffer is None else group["lr"] * buffer


def _sgd(parameter: Tensor, state: State, group: Group) -> Tensor | None:
    if group["momentum"]:
        return _momentum(parameter, state, group)
    gradient = _last_gradient(parameter, state, group)
    return None if gradient is None else group["lr"] * gradient


def _adam(parameter: Tensor, state: State, group: Group) -> Tensor | None:
    # No number of the host's, wherever the counter is: nobody waits for it.
    step = torch.as_tensor(state["step"]).double().clamp(min=1)
    beta1, beta2 = group["betas"]
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    mean = state["exp_avg"] / (1 - beta1**step)
    update = mean / ((squares / (1 - beta2**step)).sqrt() + group["eps"])
    if group.get("decoupled_weight_decay"):
        update = update + group["weight_decay"] * parameter
    return group["lr"] * update  # type: ignore[no-any-return]


def _rmsprop(parameter: Tensor, state: State, group: Group) -> Tensor | None:
    if group["momentum"]:
        return _momentum(parameter, state, group)
    gradient = _last_gradient(parameter, state, group)
    if gradient is None:
        return None
    squares = state["square_avg"]
    if group["centered"]:
        squares = squares - state["grad_avg"].square()
    return group["lr"] * gradient / (squares.sqrt() + group["eps"])  # type: ignore[no-any-return]


def _last_gradient(parameter: Tensor, state: State, group: Group) -> Tensor | None:
    """The last gradient with its weight decay, to be subtracted."""
    last = state.get(_LAST)
    if last is None:
        return None
    # Averages hold gradients of which maximize has taken the sign already; this one is as it came.
    last = -last if group.get("maximize") else last
    return last + group["weight_decay"] * parameter  # type: ignore[no-any-return]


_RULES: dict[type[Optimizer], Rule] = {SGD: _sgd, Adam: _adam, AdamW: _adam, RMSprop: _rmsprop}
