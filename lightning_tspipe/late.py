"""Asynchronous copies between device and host, so that neither waits for the other.

A host that asks a GPU for a number (``item``, ``bool``, ``cpu``) is held until everything that was
launched before has run, and then the GPU waits for the host. So a number's copy is launched behind
what computes it, and the host looks when more work has been launched behind that::

    host    forward  copy  backward          look        optimizer
    device           forward   copy  backward ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Late:
    """A tensor on its way to the host.

    Args:
        value: On any device; it may be changed afterwards.
    """

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if value.device.type != "cuda":
            self._copy = value.detach().clone()
            return
        self._copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._copy.copy_(value.detach(), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def is_there(self) -> bool:
        """Whether the host can look without being held."""
        return self._event is None or self._event.query()

    def on_host(self) -> Tensor:
        """The values in host memory; holds the host until the copy is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy

    def tolist(self) -> Any:  # noqa: ANN401 - as torch's
        """The numbers, as nested lists; holds the host until the copy is there."""
        return self.on_host().tolist()


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device; launched, so that the host is not held.

    Args:
        values: In host memory; they may be changed afterwards.
        device: Where they are wanted.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def after_backward(loss: Tensor, look: Callable[[], None]) -> None:
    """Have something looked at when the backward of a loss has been launched, on its thread.

    Args:
        loss: A tensor with a graph; its gradients stay as they are.
        look: What it raises, the backward raises.
    """

    def ask(_: Tensor) -> None:
        # Of a private module, as torch's own DDP and FSDP have it: there is no public one.
        torch.autograd.Variable._execution_engine.queue_callback(look)  # noqa: SLF001

    if loss.requires_grad:
        loss.register_hook(ask)
    else:  # there will be none
        look()
