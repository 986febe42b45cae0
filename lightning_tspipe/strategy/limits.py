"""What devices can do, as far as plans ask: memory, and operations per second."""

from __future__ import annotations

import torch

from lightning_tspipe.strategy.options import parse_bytes


def nominal_rate(device: torch.device) -> float:
    """Operations per second by which plans are made without measuring, for a kind of device.

    The same for each device of a kind, so that each of them gives the same plan.
    """
    return 5.0e13 if device.type == "cuda" else 5.0e10


def memory_limit(
    said: int | str | None, device: torch.device, *, whatever_is_free: bool = False
) -> int | None:
    """Bytes that a device may hold: as said, else most of what is free on a GPU.

    Args:
        said: By the user.
        device: The device.
        whatever_is_free: Whether a GPU counts as empty, so that each run finds the same.
    """
    if said is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int((total if whatever_is_free else free) * 0.9)
    return parse_bytes(said)
