"""Read and set parameters and hyperparameters of optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer in Lightning's wrapper."""
    plain: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return plain


def parameters_of(optimizer: Any) -> Iterator[nn.Parameter]:
    """The parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def optimizer_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in its order."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = parameters_of(optimizer)
    return [names.get(id(p), f"parameter {place}") for place, p in enumerate(parameters)]


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """A copy of what the groups hold beside their parameters: learning rates and the like."""
    return [
        {key: _copy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def set_hyperparameters(optimizer: Any, groups: Sequence[dict[str, Any]]) -> None:
    """Take over what :func:`hyperparameters` returned."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
