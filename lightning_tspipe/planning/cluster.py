"""Devices and links of a cluster: speeds, memories, latencies, bandwidths.

Devices are numbered node by node. R replicas of a pipeline of P ranks form a mesh [replica][rank]:
rank p of replica r is device ``r * P + p``. So a pipeline stays within a node where possible, and
gradient reductions, which can wait longest, cross nodes. Eight devices on two nodes, as 4 x 2 and
as 2 x 4::

    node 0: 0 1 | 2 3    node 1: 4 5 | 6 7        node 0: 0 1 2 3    node 1: 4 5 6 7
            r0    r1             r2    r3                 r0                 r1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lightning_tspipe.errors import ConfigurationError


class Link(NamedTuple):
    """The link between two devices, in each direction.

    Attributes:
        latency: Seconds from the end of sending a message to its arrival.
        bandwidth: Bytes per second.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __str__(self) -> str:
        """Bandwidth and latency in words.

        >>> print(Link(1.5e-4, 4e9))
        4 GB/s, 150 µs per message
        """
        return f"{self.bandwidth / 1e9:g} GB/s, {self.latency * 1e6:g} µs per message"


FREE = Link()
"""A link that costs nothing."""


@dataclass(frozen=True)
class Ranks:
    """The devices as the ranks of one pipeline; each rank is as slow as its slowest replica.

    Replicas wait for each other at every optimizer step, so the slowest device that holds a rank
    determines its speed.

    Attributes:
        speeds: Speed of each rank, relative to the device that was measured.
        memories: Bytes of each rank; infinity if unknown.
        nodes: Number of each rank's node: ranks with different numbers are on different nodes, in
            at least one replica; () if all are on one node.
        link: Link between ranks of one node.
        inter_node_link: Link between ranks of different nodes.
        ring_links: For each rank, the slowest link between its replicas.
        num_replicas: Number of replicas of the pipeline.
    """

    speeds: tuple[float, ...]
    memories: tuple[float, ...]
    nodes: tuple[int, ...]
    link: Link
    inter_node_link: Link
    ring_links: tuple[Link, ...]
    num_replicas: int = 1

    def reduction_seconds(self, rank: int, num_bytes: float) -> float:
        """Seconds to sum the gradients of ``rank`` over the replicas.

        Each device sends ``2 (R - 1) / R`` times its gradients, as in a ring, over the slowest link
        between the replicas, in ``2 log2 R`` consecutive messages, as in Rabenseifner's algorithm
        (Thakur, Rabenseifner and Gropp, IJHPCA 2005). Other traffic on the link is not considered.
        """
        if self.num_replicas == 1:
            return 0.0
        latency, bandwidth = self.ring_links[rank]
        share = 2 * (self.num_replicas - 1) / self.num_replicas
        rounds = 2 * math.ceil(math.log2(self.num_replicas))
        return rounds * latency + share * num_bytes / bandwidth


@dataclass(frozen=True)
class Cluster:
    """Devices and links.

    Attributes:
        num_devices: Number of devices.
        link: Link between two devices of one node.
        speeds: Speed of each device, relative to the device that was measured; the list repeats, so
            that the devices of one node are enough; () means 1.
        memories: Bytes of each device, repeated likewise; () means unlimited.
        num_nodes: Number of nodes, each with the same number of devices.
        inter_node_link: Link between two devices of different nodes; None means as ``link``.

    Raises:
        ConfigurationError: The numbers contradict each other.
    """

    num_devices: int
    link: Link = FREE
    speeds: tuple[float, ...] = ()
    memories: tuple[float, ...] = ()
    num_nodes: int = 1
    inter_node_link: Link | None = None

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ConfigurationError(f"{self.num_devices} devices; at least 1 is needed")
        if self.num_nodes < 1 or self.num_devices % self.num_nodes:
            raise ConfigurationError(
                f"{self.num_devices} devices on {self.num_nodes} nodes: every node must have "
                "equally many"
            )
        for what, values in (("speeds", self.speeds), ("memories", self.memories)):
            if any(not value > 0 for value in values):
                raise ConfigurationError(f"{what} {list(values)}: all must be greater than 0")
            if values and self.num_devices % len(values):
                raise ConfigurationError(
                    f"{len(values)} {what} for {self.num_devices} devices: give one for each "
                    "device, or a list that repeats (those of one node)"
                )

    def ranks(self, num_replicas: int = 1) -> Ranks:
        """The devices as the ranks of one of ``num_replicas`` equal pipelines.

        Raises:
            ConfigurationError: The devices cannot be divided so.
        """
        if num_replicas < 1 or self.num_devices % num_replicas:
            raise ConfigurationError(
                f"{self.num_devices} devices cannot be divided evenly into {num_replicas} "
                f"replicas; {_divisors_text(self.num_devices)} are possible"
            )
        num_ranks = self.num_devices // num_replicas
        per_node = self.num_devices // self.num_nodes
        between = self.inter_node_link or self.link
        slower = Link(
            max(self.link.latency, between.latency), min(self.link.bandwidth, between.bandwidth)
        )
        copies = [range(rank, self.num_devices, num_ranks) for rank in range(num_ranks)]
        # A node may end within one replica and not within another: any of them counts.
        ends = [any(device % per_node == 0 for device in held) for held in copies]
        nodes = tuple(sum(ends[1 : rank + 1]) for rank in range(num_ranks))
        return Ranks(
            speeds=tuple(min(_of(self.speeds, held, default=1.0)) for held in copies),
            memories=tuple(min(_of(self.memories, held, default=math.inf)) for held in copies),
            nodes=nodes if nodes[-1] else (),
            link=self.link,
            inter_node_link=between,
            ring_links=tuple(
                self.link if held[0] // per_node == held[-1] // per_node else slower
                for held in copies
            ),
            num_replicas=num_replicas,
        )


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of ``number``, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(part for part in range(1, number + 1) if number % part == 0)


def _divisors_text(number: int) -> str:
    *most, last = map(str, divisors(number))
    return f"{', '.join(most)} and {last}" if most else last


def _of(values: tuple[float, ...], devices: range, *, default: float) -> list[float]:
    return [values[device % len(values)] if values else default for device in devices]
