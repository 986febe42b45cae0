"""Breakdown of the memory of each device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by rank.

    Attributes:
        parameters: The student's parameters and buffers.
        gradients: Gradients of the trained parameters.
        optimizer: Optimizer state: momentum, moments.
        teacher: The teacher's parameters and buffers.
        activations: Activations that the student saves from forward to backward, and inputs that
            its stages received, of all units and of all batches in flight.
        versions: Copies of the trained weights beside the current ones; () if there are none.
        messages: Receive buffers other than those of the student's activations; () in a plan of an
            older version.
    """

    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]
    teacher: tuple[int, ...]
    activations: tuple[int, ...]
    versions: tuple[int, ...] = ()
    messages: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> Iterator[tuple[str, int]]:
        """Names and bytes of each part, for one rank."""
        for part in fields(self):
            amounts = getattr(self, part.name)
            if amounts:
                yield part.name, amounts[rank]
