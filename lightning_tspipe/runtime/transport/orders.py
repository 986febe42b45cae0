"""In which order of memory gradients travel: the one in which they are made.

What a forward passes on has the same order each time, which is known before it runs. The order of
a gradient is that of whatever kernel makes it, and with another one the kernels behind it would add
numbers in another order, which changes their last bits. So the sender tells the order with the
first one of a kind, and keeps to it::

    first      order ──► object          gradient, in that order ──► tensor
    others                               gradient, in that order ──► tensor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_tspipe.capture.plan import Specs, TensorSpec
from lightning_tspipe.runtime.transport.channels import Channel

Kind = tuple[Channel, Specs]
"""Of messages: what they are for, and what their tensors are like as far as it is known."""


class Orders:
    """The orders that a rank has told, and those that it was told.

    Args:
        send: Sends an object: it, to whom, on which channel.
        receive: Waits for one: from whom, on which channel.
    """

    def __init__(
        self, send: Callable[[Any, int, Channel], None], receive: Callable[[int, Channel], Any]
    ) -> None:
        self._send, self._receive = send, receive
        self._told: dict[tuple[int, Kind], Specs] = {}
        self._heard: dict[tuple[int, Kind], Specs] = {}

    def tell(self, tensors: Sequence[Tensor], target: int, kind: Kind) -> list[Tensor]:
        """What to send, as the kind says; its receiver hears of the order if it doesn't know it.

        Args:
            tensors: The first or another message of its kind.
            target: Who receives it.
            kind: The kind.
        """
        if (target, kind) not in self._told:
            pairs = zip(kind[1], tensors, strict=True)
            specs = tuple(replace(spec, order=TensorSpec.of(t).order) for spec, t in pairs)
            self._told[target, kind] = specs
            self._send((kind, specs), target, Channel.ORDERS)
        return _relaid(tensors, self._told[target, kind], kind[1])

    def hear(self, tensors: Sequence[Tensor], source: int, kind: Kind) -> list[Tensor]:
        """What was received, in the order in which it was made.

        Args:
            tensors: The message, as its kind says.
            source: Who sent it.
            kind: The kind.
        """
        while (source, kind) not in self._heard:  # what was told of a message that was dropped, too
            told, specs = self._receive(source, Channel.ORDERS)
            self._heard[source, told] = specs
        return _relaid(tensors, kind[1], self._heard[source, kind])


def _relaid(tensors: Sequence[Tensor], own: Specs, others: Specs) -> list[Tensor]:
    """The same memory, taken to be in another order."""
    return [
        other.from_memory(spec.to_memory(tensor.detach()).contiguous().view(other.memory_shape))
        for tensor, spec, other in zip(tensors, own, others, strict=True)
    ]
