"""Networks, cut as a call of theirs is recorded."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.program import Program


def cut(network: nn.Module, *args: Any, **kwargs: Any) -> Program:
    """Cut a network that is called so."""
    return Program(network, "", Arguments.of(args, kwargs))
