"""Asynchronous copies between device and host, so that neither waits for the other.

Reading a number from a GPU (``item``, ``bool``, ``cpu``) blocks the host until everything launched
before has run, and then the GPU waits for the host. So the copy of a number is launched after the
kernel that computes it, and the host reads it once more work has been launched::

    host    forward  copy  backward          read        optimizer
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
        value: A tensor on any device; it may be changed afterwards.
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
        """Whether the host can read it without waiting."""
        return self._event is None or self._event.query()

    def on_host(self) -> Tensor:
        """The values in host memory; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy

    def tolist(self) -> Any:  # noqa: ANN401 - as torch's
        """The values as nested lists; waits until they have arrived."""
        return self.on_host().tolist()


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from the host to a device, without blocking the host.

    Args:
        values: A tensor in host memory; it may be changed afterwards.
        device: The device.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


_NUM_SAMPLES = 64


def sample_of(values: Tensor) -> Tensor:
    """A number in float64 that other values would hardly have; of large tensors, of some of them.

    Args:
        values: A tensor of any shape.
    """
    flat = values.detach().flatten()
    return flat[:: max(1, len(flat) // _NUM_SAMPLES)].double().sum().nan_to_num()


def after_backward(loss: Tensor, look: Callable[[], None]) -> None:
    """Call a function when the backward of a loss has been launched, on the same thread.

    Args:
        loss: A tensor with a graph; its gradients do not change.
        look: The function; errors that it raises are raised by the backward.
    """

    def ask(_: Tensor) -> None:
        # Private, but also used by torch's own DDP and FSDP: there is no public function.
        torch.autograd.Variable._execution_engine.queue_callback(look)  # noqa: SLF001

    if loss.requires_grad:
        loss.register_hook(ask)
    else:  # there will be no backward
        look()
