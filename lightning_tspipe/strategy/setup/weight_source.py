"""Share or build the initial weights of a module, before its stages are placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.networks.construction import Construction
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.materializing import Materializer, Source, is_on_meta
from lightning_tspipe.runtime.weights.ownership import named_tensors, put


@dataclass(frozen=True)
class InitialWeights:
    """Sources of the initial weights of a module.

    Attributes:
        construction: How parts that are on the meta device were built.
        source: A checkpoint that has values for them.
        placement: Of a module that is spread over the ranks already, and stays so.
    """

    construction: Construction = field(default_factory=Construction)
    source: Source | None = None
    placement: Placement | None = None


def share_weights(
    module: nn.Module,
    networks: Networks,
    transport: Transport,
    replicas: Replicas,
    initial: InitialWeights,
) -> Materializer | None:
    """Every rank gets the weights of the loss rank, whatever its own random numbers were.

    Args:
        module: The module.
        networks: Its pipelined submodules.
        transport: How to reach the other ranks of the pipeline.
        replicas: The other pipelines, if they are to have the first one's weights.
        initial: Where values come from that the loss rank has not.

    Returns:
        Where the values of the pipelined networks come from, if the loss rank has none.
    """
    inside = tuple(f"{name}." for _, name in networks.items())
    # What is spread over the ranks already is not sent around.
    shared = {
        name: tensor
        for name, tensor in named_tensors(module)
        if initial.placement is None or not name.startswith(inside)
    }
    if transport.num_ranks * replicas.number > 1:
        _receive(module, shared, transport, replicas)
    if initial.placement is not None or not is_on_meta(module):
        return None
    materializer = Materializer(module, initial.construction, initial.source)
    materializer.agree(transport, replicas)
    materializer.fill(lambda name: not name.startswith(inside))
    materializer.fill_attributes()
    return materializer


def _receive(
    module: nn.Module, shared: Mapping[str, Tensor], transport: Transport, replicas: Replicas
) -> None:
    """Take the loss rank's values, of all that has values there."""
    mine = transport.rank == LOSS_RANK and replicas.is_first
    state = None
    if mine:
        state = {name: t.detach().cpu() for name, t in shared.items() if not t.is_meta}
    if transport.rank == LOSS_RANK:
        state = replicas.broadcast(state)
    state = transport.broadcast_object(state, LOSS_RANK)
    if mine:
        return
    for name, value in state.items():
        if shared[name].is_meta:
            put(module, shared[name], value)
        else:
            with torch.no_grad():
                shared[name].copy_(value)
