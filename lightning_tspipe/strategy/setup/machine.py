"""Rates, links and memory of the machine, for plans."""

from __future__ import annotations

import torch

from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.links import NOMINAL
from lightning_tspipe.strategy.setup.options import parse_bytes


def nominal_rate(device: torch.device) -> float:
    """Operations per second by which plans are made without measuring, for a kind of device.

    The same for each device of a kind, so that each of them gives the same plan.
    """
    return 5.0e13 if device.type == "cuda" else 5.0e10


def link_of(transport: Transport, *, by_flops: bool) -> Link:
    """What is between two ranks: as measured, unless plans are to be the same in each run."""
    return NOMINAL if by_flops or transport.link is None else transport.link


def memory_limit(
    said: int | str | None,
    device: torch.device,
    *,
    ranks_per_device: int = 1,
    whatever_is_free: bool = False,
) -> int | None:
    """Bytes that a rank may hold: as said, else most of what is free on a GPU, fairly shared.

    One part in ten is left for what plans don't count: what kernels need for a while, and gaps
    between tensors. Connections between neighbours are there already, and their buffers with them.

    Args:
        said: By the user.
        device: The device.
        ranks_per_device: Ranks that share it.
        whatever_is_free: Whether a GPU counts as empty, so that each run finds the same.
    """
    if said is not None or device.type != "cuda":
        return parse_bytes(said)
    torch.cuda.empty_cache()  # what other ranks only hold in reserve is theirs; this rank's is free
    free, total = torch.cuda.mem_get_info(device)
    return int((total if whatever_is_free else free) * 0.9 / ranks_per_device)
