"""What is relayed from one rank to another, step after step, into two buffers in turn.

A receiver asks for the next step's activations as soon as it has those of this one, so that they
travel while it computes. Their shape is not known then: they are asked for in that of before. Where
this turns out wrong (the last batch of an epoch), the sender first sends a *filler* of the old
shape, which nobody reads; both ranks know the shapes, and so know of it. ::

    receiver   ask 8 │ take │ ask 8 │ take │ ask 8 │ drop │ ask 3 │ take
    sender          8 ───┘      8 ─────┘   filler ─────┘  3 ────────┘
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import Channel


class Inbox:
    """The receiving end.

    Args:
        transport: How to reach the sender.
        source: Who sends.
        channel: The channel, which nothing else uses.
        early: Whether to ask before the shape is known.
    """

    def __init__(self, transport: Transport, source: int, channel: Channel, *, early: bool) -> None:
        self._transport = transport
        self._source = source
        self._channel = channel
        self._early = early
        self._asked: tuple[TensorSpec, Receipt] | None = None
        self._filler: Receipt | None = None

    def ask(self, spec: TensorSpec) -> None:
        """The next message is of this kind."""
        if self._asked is not None and self._asked[0] != spec:
            self._filler, self._asked = self._asked[1], None
        if self._asked is None:
            self._post(spec)

    def _post(self, spec: TensorSpec) -> None:
        receipt = self._transport.receive([spec], self._source, self._channel)
        self._asked = spec, receipt

    def take(self) -> Tensor:
        """What was asked for, as soon as it is here.

        Raises:
            TransportError: The sender ended or stalled.
        """
        self._drop_filler()
        assert self._asked is not None
        (spec, receipt), self._asked = self._asked, None
        (tensor,) = receipt.wait()
        if self._early:
            self._post(spec)
        return tensor

    def _drop_filler(self) -> None:
        filler, self._filler = self._filler, None
        if filler is not None:
            self._transport.recycle(filler.wait())

    def settle(self) -> None:
        """There is no next message for now; the sender settles too."""
        self._drop_filler()
        if self._asked is not None:
            self._filler, self._asked = self._asked[1], None
            self._drop_filler()


class Outbox:
    """The sending end of an :class:`Inbox`; its arguments are that one's."""

    def __init__(self, transport: Transport, target: int, channel: Channel, *, early: bool) -> None:
        self._transport = transport
        self._target = target
        self._channel = channel
        self._early = early
        self._expected: TensorSpec | None = None
        self._device = torch.device("cpu")

    def send(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Send the next message; returns at once.

        Args:
            tensor: The message.
            spec: What the inbox asks for.
        """
        self._device = tensor.device
        if spec != self._expected:
            self.settle()
        self._transport.send([tensor], self._target, self._channel, [spec])
        self._expected = spec if self._early else None

    def settle(self) -> None:
        """Send a filler, if the receiver has asked already."""
        spec, self._expected = self._expected, None
        if spec is not None:
            filler = torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
            self._transport.send([filler], self._target, self._channel, [spec])
