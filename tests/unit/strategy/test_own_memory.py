"""Workers that torch starts share the tensors of their parent, until each has its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_tspipe.strategy.lightning.launching import own_memory


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.queue = torch.zeros(2)  # no buffer
        self.share_memory()
        self.queue.share_memory_()


class Callback:
    def __init__(self) -> None:
        self.centre = torch.zeros(2).share_memory_()
        self.teacher = Network()

    def state_dict(self) -> dict[str, Any]:
        return {}


def shared(module: Network) -> list[bool]:
    tensors = [*module.parameters(), *module.buffers(), module.queue]
    return [tensor.is_shared() for tensor in tensors]


def test_modules_and_callbacks_get_their_own() -> None:
    module, callback = Network(), Callback()
    parameters = list(module.parameters())
    assert all(shared(module))
    own_memory([module, callback, 3, None])
    assert not any(shared(module))
    assert not any(shared(callback.teacher))
    assert not callback.centre.is_shared()
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad for parameter in parameters)


def test_data_stay_shared() -> None:
    """All of them read the same data set, which may be large."""
    data = TensorDataset(torch.zeros(3).share_memory_())
    own_memory([data])
    assert data.tensors[0].is_shared()
