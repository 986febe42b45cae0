"""Freed memory: it stays with a process that computes on the CPU, and is handed back once."""

from __future__ import annotations

import ctypes
import platform

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's ``mallopt(3)``."""


def keep_freed_memory() -> bool:
    """Let the C library keep what tensors free, instead of handing it back to the system.

    By default every large tensor is mapped when made and unmapped when freed, and the system
    zeroes its pages anew each time: about 5 % of a ResNet-18's step, more where activations wait
    long for their backward. The process stays as large as it once was.

    Returns:
        Whether the C library is one that listens (glibc).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    largest = 2**31 - 1
    settings = {_MMAP_THRESHOLD: 2**30, _TRIM_THRESHOLD: largest, _TOP_PAD: 2**26}
    return all(libc.mallopt(name, value) == 1 for name, value in settings.items())


def give_back_memory(device: torch.device) -> None:
    """Hand back what is free, once: after measuring, which needs more than training does.

    A GPU's peak counts from here on: what is reported is the training's.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
