"""Breakdown of the memory of each device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by rank.

    Attributes:
        parameters: The student's parameters and buffers.
        gradients: Of the trained parameters.
        optimizer: What the optimizer keeps: momentum, moments.
        teacher: The teacher's parameters and buffers.
        activations: What the student keeps from forward to backward, of all units at once, and
            what its stages received; of all batches that are under way at once.
        versions: Copies of the trained weights beside the current ones; () where there is no
            other version than that.
        messages: Room for what a step receives beside the student's activations; () in a plan of
            an older version.
    """

    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]
    teacher: tuple[int, ...]
    activations: tuple[int, ...]
    versions: tuple[int, ...] = ()
    messages: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> Iterator[tuple[str, int]]:
        """Names and bytes of one rank."""
        for part in fields(self):
            amounts = getattr(self, part.name)
            if amounts:
                yield part.name, amounts[rank]
