"""Peak memory and peak FLOP/s of a device."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from lightning.fabric.utilities.throughput import get_available_flops

_MIB = 2**20


def peak_memory(device: torch.device) -> float:
    """Peak memory in MiB: of tensors on a GPU, else of the process (0 if unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _MIB
    if find_spec("resource") is None:  # Windows
        return 0.0
    import resource  # noqa: PLC0415
    import sys  # noqa: PLC0415

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak / 1024


def known_peak_flops(device: torch.device, precision: str) -> float | None:
    """Nominal floating-point operations per second of a device; None if unknown.

    Args:
        device: The device.
        precision: The Trainer's.
    """
    if device.type == "cpu":
        return None
    types = {"16": torch.float16, "bf": torch.bfloat16, "64": torch.float64}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown device needs no action
        return get_available_flops(device, types.get(precision[:2], torch.float32))
