"""Torch's operations behind the functions that networks call: what they draw, multiply, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_tspipe.networks.arguments import tensors_in


class Operations(TorchDispatchMode):
    """Notes what the operations behind calls do.

    Attributes:
        num_draws: How many have drawn random numbers.
        num_products: How many have multiplied matrices.
        written: The tensors that they have changed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_draws = self.num_products = 0
        self.written: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = given_to(func, args, kwargs)
        # An attention draws for its dropout only.
        is_off = "dropout_p" in given and not given["dropout_p"][0]
        self.num_draws += torch.Tag.nondeterministic_seeded in func.tags and not is_off
        self.num_products += func.overloadpacket in flop_registry
        self.written += tensors_in([value for value, is_written in given.values() if is_written])
        return func(*args, **kwargs)


def given_to(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, tuple[Any, bool]]:
    """What an operation is given, defaults too, and whether it changes that, by name."""
    schema = func._schema.arguments  # noqa: SLF001 - there is no public way
    found = {each.name: each.default_value for each in schema}
    found |= {each.name: value for each, value in zip(schema, args, strict=False)}
    found |= kwargs
    written = {each.name for each in schema if each.alias_info and each.alias_info.is_write}
    return {name: (value, name in written) for name, value in found.items()}
