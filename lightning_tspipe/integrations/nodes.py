"""Ranks on nodes: where the edges of pipelines lie.

A pipeline takes ranks that follow each other. Where these are numbered node by node, neighbouring
stages, which exchange activations in every step, are on one node, except where it ends; and
replicas, which exchange gradients once per update, are on several. Eight ranks on two nodes, with
``num_stages=4`` and with ``num_stages=8``::

    node 0: 0─1─2─3   node 1: 4─5─6─7        node 0: 0─1─2─3 ─── node 1: 4─5─6─7
            replica 0         replica 1              one pipeline, of which one edge crosses
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from lightning_tspipe.strategy.setup.refusals import refuse


def check_nodes(nodes: Sequence[int], num_stages: int) -> str:
    """Look whether pipelines of ranks that follow each other lie on as few nodes as they can.

    >>> check_nodes([0, 0, 0, 0, 1, 1, 1, 1], 4)
    ''
    >>> print(check_nodes([0, 0, 0, 1, 1, 1], 2))  # doctest: +ELLIPSIS
    num_stages=2 with 3 workers on each node: 1 of 3 pipelines lies on two nodes, ...

    Args:
        nodes: The node of each rank.
        num_stages: Ranks of a pipeline.

    Returns:
        What could be better; "" if nothing.

    Raises:
        ConfigurationError: Nodes have unequally many ranks, or ranks of a node don't follow each
            other.
    """
    runs = [(node, len([*ranks])) for node, ranks in groupby(nodes)]
    counts = [nodes.count(node) for node in dict.fromkeys(nodes)]
    refuse({
        f"Ray's workers are on the nodes {list(nodes)}, by rank: neighbouring stages would be on "
        "different nodes. Ray numbers workers node by node unless told otherwise; use the "
        "TorchTrainer's own order": len(runs) > len(counts),
        f"the nodes have {' and '.join(map(str, counts))} workers, and every node must have "
        "equally many. Set ScalingConfig(num_workers=...) to a multiple of what fits on a node "
        "(resources_per_worker), or placement_strategy='SPREAD'": len({*counts}) > 1,
    })  # fmt: skip
    per_node = counts[0]
    pipelines = range(0, len(nodes), num_stages)
    crossing = sum(nodes[first] != nodes[first + num_stages - 1] for first in pipelines)
    if num_stages > per_node or not crossing:
        return ""
    fitting = [size for size in range(1, per_node + 1) if per_node % size == 0]
    verb = "lies" if crossing == 1 else "lie"
    return (
        f"num_stages={num_stages} with {per_node} workers on each node: {crossing} of "
        f"{len(pipelines)} pipelines {verb} on two nodes, between which activations travel. "
        f"num_stages of {' or '.join(map(str, fitting))} keeps each pipeline on a node"
    )
