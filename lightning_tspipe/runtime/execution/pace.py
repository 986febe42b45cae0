"""Bounds how far ranks run ahead of those that read what they make: queues are bounded."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Channel, Edge


class Pace:
    """One rank's part: it tells of its steps, and waits for ranks that are too far behind.

    Args:
        transport: How to reach the other ranks.
        edges: Who makes something for whom.
        slack: Steps that a rank may be ahead.

    Attributes:
        slack: The same.
    """

    def __init__(self, transport: Transport, edges: Iterable[Edge], slack: int) -> None:
        own, pairs = transport.rank, {(edge.source, edge.target) for edge in edges}
        self._transport = transport
        self._before = sorted({a for a, b in pairs if b == own != a})
        self._owed = dict.fromkeys(sorted({b for a, b in pairs if a == own != b}), 0)
        self.slack = slack

    def tell(self) -> None:
        """This rank is at its next step: those that it reads of hear of it."""
        for rank in self._before:
            self._transport.send_object(None, rank, Channel.PACE)
        for rank in self._owed:
            self._owed[rank] += 1

    def wait(self, slack: int | None = None) -> None:
        """Wait for ranks that are more than so many steps behind this one.

        Args:
            slack: The number, if not the usual one.
        """
        most = self.slack if slack is None else slack
        for rank, owed in self._owed.items():
            for _ in range(owed - most):
                with waiting(f"rank {rank}, which is {owed} batches behind"):
                    self._transport.receive_object(rank, Channel.PACE)
                self._owed[rank] -= 1
