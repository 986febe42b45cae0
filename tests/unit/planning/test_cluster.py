from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.cluster import Cluster, Link

NEAR, FAR = Link(1e-6, 300e9), Link(1e-5, 25e9)


def test_equal_devices_on_one_node() -> None:
    ranks = Cluster(4, NEAR).ranks()
    assert ranks.speeds == (1.0,) * 4
    assert ranks.memories == (math.inf,) * 4
    assert ranks.nodes == ()


@pytest.mark.parametrize(
    ("num_devices", "num_nodes", "num_replicas", "nodes", "rings"),
    [
        (8, 2, 1, (0, 0, 0, 0, 1, 1, 1, 1), [NEAR] * 8),
        # A pipeline per node: gradients cross.
        (8, 2, 2, (), [FAR] * 4),
        (8, 2, 4, (), [FAR] * 2),
        (8, 2, 8, (), [FAR]),
        (8, 1, 2, (), [NEAR] * 4),
        # Three ranks on nodes of four: of the four replicas one crosses after its first rank, and
        # one after its second.
        (12, 3, 4, (0, 1, 2), [FAR] * 3),
        # Two nodes per replica.
        (8, 4, 2, (0, 0, 1, 1), [FAR] * 4),
    ],
)
def test_what_is_on_which_node(
    num_devices: int, num_nodes: int, num_replicas: int, nodes: tuple[int, ...], rings: list[Link]
) -> None:
    cluster = Cluster(num_devices, NEAR, num_nodes=num_nodes, inter_node_link=FAR)
    ranks = cluster.ranks(num_replicas)
    assert ranks.nodes == nodes
    assert list(ranks.ring_links) == rings
    assert (ranks.link, ranks.inter_node_link) == (NEAR, FAR)


def test_a_ring_crosses_its_slowest_link() -> None:
    # Between nodes there is more bandwidth here, but not more than within them.
    cluster = Cluster(4, Link(2e-6, 1e9), num_nodes=2, inter_node_link=Link(1e-6, 9e9))
    assert cluster.ranks(4).ring_links == (Link(2e-6, 1e9),)


def test_the_worst_of_its_replicas_counts_for_a_rank() -> None:
    cluster = Cluster(8, speeds=(1, 2, 0.5, 4), memories=(8, 7, 6, 5, 4, 3, 2, 1))
    assert cluster.ranks(1).speeds == (1, 2, 0.5, 4) * 2
    assert cluster.ranks(2).speeds == (1, 2, 0.5, 4)
    assert cluster.ranks(2).memories == (4, 3, 2, 1)
    assert cluster.ranks(4).speeds == (0.5, 2)
    assert cluster.ranks(4).memories == (2, 1)
    assert cluster.ranks(8).speeds == (0.5,)


def test_gradients_are_summed_in_a_ring() -> None:
    cluster = Cluster(8, NEAR, num_nodes=2, inter_node_link=Link(1e-3, 1e6))
    # Each of four sends 6/4 of its bytes, in 2 log2(4) rounds.
    assert cluster.ranks(4).reduction_seconds(0, 2e6) == pytest.approx(4 * 1e-3 + 1.5 * 2)
    assert cluster.ranks(1).reduction_seconds(0, 2e6) == 0


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"num_devices": 0}, "at least 1"),
        ({"num_devices": 8, "num_nodes": 3}, "8 devices on 3 nodes.*equally many"),
        ({"num_devices": 8, "num_nodes": 0}, "equally many"),
        ({"num_devices": 8, "speeds": (1.0, 0.0)}, "all must be greater than 0"),
        ({"num_devices": 8, "speeds": (1.0, math.nan)}, "all must be greater than 0"),
        ({"num_devices": 8, "memories": (1.0,) * 3}, "3 memories for 8 devices: give one for each"),
    ],
)
def test_what_is_no_cluster(arguments: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        Cluster(**arguments)


@pytest.mark.parametrize("num_replicas", [0, 5, 24])
def test_devices_that_cannot_be_divided(num_replicas: int) -> None:
    with pytest.raises(ConfigurationError, match="1, 2, 3, 4, 6 and 12 are possible"):
        Cluster(12).ranks(num_replicas)
