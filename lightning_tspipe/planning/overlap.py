"""Communication of data parallelism, beside what a device computes meanwhile.

DDP sums gradients in buckets while the backward goes on (Li et al., *PyTorch Distributed*, VLDB
2020, section 3.2). Only the last bucket has nothing to hide behind::

    device |  forward  | backward b3 | b2 | b1 |              update
    link   |           |             | sum b3  | sum b2, b1  |

FSDP gathers the parameters of a block while the one before it computes, and sums and divides the
gradients of a block while the next one computes (Zhao et al., *PyTorch FSDP*, VLDB 2023, section
3.3). On the link, the gathering of a block comes before the gradients of the one before it::

    device |          | block 3      | block 2                | block 1
    link   | gather 3 | gather 2     | gather 1 | scatter 3   | scatter 2 ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_tspipe.planning.cluster import FREE, Link

FIRST_BUCKET = 2**20
"""Bytes after which DDP sends its first bucket, so that the link has something to do early."""

BUCKET = 25 * 2**20
"""Bytes of every other bucket, by default."""


@dataclass(frozen=True)
class Collectives:
    """How fast devices sum gradients and gather parameters, and whether they compute meanwhile.

    A sum over N devices is that of a ring: each sends ``2 (N - 1) / N`` of the bytes. Gathering
    from all, and summing into parts, is half of that. Latencies are those of ``log2 N`` rounds.

    Attributes:
        num_devices: Number of devices.
        all_reduce: The link, as sums of gradients find it.
        all_gather: The link, as gathering finds it.
        reduce_scatter: The link, as sums into parts find it.
        overlap: Share of the communication's time in which a device computes as if there were
            none: 1 where hardware of its own copies and adds, 0 where the cores that compute do.
    """

    num_devices: int
    all_reduce: Link = FREE
    all_gather: Link = FREE
    reduce_scatter: Link = FREE
    overlap: float = 1.0

    @classmethod
    def over(cls, link: Link, num_devices: int) -> Collectives:
        """All of them over one link, hidden as far as the order of the work allows."""
        return cls(num_devices, link, link, link)

    def sum_seconds(self, num_bytes: float, messages: int = 1) -> float:
        """Seconds to sum gradients over all devices, in so many messages."""
        return 2 * self._seconds(self.all_reduce, num_bytes, messages)

    def gather_seconds(self, num_bytes: float) -> float:
        """Seconds until each device has all of so many bytes, of which each held its part."""
        return self._seconds(self.all_gather, num_bytes)

    def scatter_seconds(self, num_bytes: float) -> float:
        """Seconds until each device has its part of a sum of so many bytes."""
        return self._seconds(self.reduce_scatter, num_bytes)

    def _seconds(self, link: Link, num_bytes: float, messages: int = 1) -> float:
        """One way around the ring."""
        number = self.num_devices
        if number == 1 or not num_bytes:
            return 0.0
        rounds = messages * math.ceil(math.log2(number))
        return rounds * link.latency + (number - 1) / number * num_bytes / link.bandwidth

    def shared(self, computing: float, communicating: float, overlapped: float) -> float:
        """Seconds of both together, if a device computes in only a share of the time.

        Args:
            computing: Seconds of computing alone.
            communicating: Seconds of communication alone.
            overlapped: Seconds of both, if neither slows down the other.
        """
        return self.overlap * overlapped + (1 - self.overlap) * (computing + communicating)


class Ready(NamedTuple):
    """Gradients that a backward has just made.

    Attributes:
        seconds: When, from the beginning of the pass.
        num_bytes: How many.
    """

    seconds: float
    num_bytes: float


def reduced_in_buckets(
    computing: float, gradients: Sequence[Ready], collectives: Collectives
) -> float:
    """Seconds of a pass whose gradients are summed over all devices, in buckets.

    Args:
        computing: Seconds of the pass alone.
        gradients: What its backward makes, in order.
        collectives: Speed of the devices' communication.
    """
    link = total = filled = 0.0
    limit = FIRST_BUCKET
    for place, ready in enumerate(gradients, 1):
        filled += ready.num_bytes
        if filled < limit and place < len(gradients):
            continue
        seconds = collectives.sum_seconds(filled, max(1, round(filled / BUCKET)))
        link = max(link, ready.seconds) + seconds
        total += seconds
        filled, limit = 0.0, BUCKET
    return collectives.shared(computing, total, max(computing, link))


class Block(NamedTuple):
    """A block's forward or backward under FSDP.

    Attributes:
        seconds: Of computing.
        gathered: Bytes of parameters that it needs whole.
        scattered: Bytes of gradients that it leaves.
    """

    seconds: float
    gathered: float = 0.0
    scattered: float = 0.0


def gathered_by_block(blocks: Iterable[Block], collectives: Collectives) -> float:
    """Seconds of a pass whose blocks gather their parameters and divide their gradients.

    Args:
        blocks: In the order in which they compute: forwards, then backwards.
        collectives: Speed of the devices' communication.
    """
    device = link = begun = computing = total = scattering = 0.0
    for block in (*blocks, Block(0.0)):
        gathering = collectives.gather_seconds(block.gathered)
        is_here = 0.0
        if gathering:  # asked for when the block before began
            is_here = link = max(link, begun) + gathering
        if scattering:
            link = max(link, device) + scattering
        begun = max(device, is_here)
        device = begun + block.seconds
        computing += block.seconds
        total += gathering + scattering
        scattering = collectives.scatter_seconds(block.scattered)
    return collectives.shared(computing, total, max(device, link))
