"""What torchrun has started: nodes and processes, whose numbers may differ after a restart.

A Trainer can't be told "as many nodes as there are". So where it leaves a number at what Lightning
takes by itself (``devices="auto"``, ``num_nodes=1``), torchrun's own counts; any other number that
contradicts torchrun is a mistake, which each process would otherwise train alone with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from lightning_tspipe.errors import ConfigurationError


@dataclass(frozen=True)
class World:
    """The processes that torchrun has started.

    Attributes:
        num_nodes: Nodes.
        num_local: Processes on each of them.
    """

    num_nodes: int
    num_local: int

    def nodes(self, given: int) -> int:
        """The number of nodes, if that of the Trainer is not another one.

        Raises:
            ConfigurationError: It is.
        """
        if given not in {1, self.num_nodes}:
            raise ConfigurationError(
                f"Trainer(num_nodes={given}), but torchrun has started {self.num_nodes}. Leave "
                "num_nodes out: torchrun's number is used, also when it changes (--nnodes 1:2)"
            )
        return self.num_nodes

    def devices(
        self, given: list[torch.device], num_auto: int, ranks_per_device: int
    ) -> list[torch.device]:
        """The devices of this node, if those of the Trainer are not others.

        Args:
            given: The Trainer's.
            num_auto: How many it would have taken by itself, with ``devices="auto"``.
            ranks_per_device: Processes that share one.

        Raises:
            ConfigurationError: They are.
        """
        number, rest = divmod(self.num_local, ranks_per_device)
        if number == len(given) and not rest:
            return given
        if len(given) == num_auto and not rest:
            if given[0].type == "cpu":
                return given[:1] * number
            if number < len(given):
                return given[:number]
        shared = f" with ranks_per_device={ranks_per_device}" if ranks_per_device > 1 else ""
        raise ConfigurationError(
            f"Trainer(devices={len(given)}){shared}, but torchrun has started {self.num_local} "
            "processes on each node. Leave devices out, or give torchrun that number: "
            f"--nproc-per-node {len(given) * ranks_per_device}"
        )


def started_world() -> World | None:
    """What torchrun has started; None where it doesn't say so.

    Raises:
        ConfigurationError: The nodes have different numbers of processes.
    """
    if not {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return None
    total, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", total // local))
    if num_nodes * local != total:
        raise ConfigurationError(
            f"torchrun has started {total} processes on {num_nodes} nodes, {local} of them on this "
            "one: each node must have as many. Give all of them the same --nproc-per-node"
        )
    return World(num_nodes, local)


def stages_for(num_ranks: int, num_stages: int) -> int:
    """The length of pipelines where the wanted one does not divide the ranks that are left.

    There are fewer replicas first; what each of them has is a pipeline that is at least as long,
    so that it fits into memory where the wanted one did. Only where fewer ranks are left than one
    pipeline has is it shorter.

    Args:
        num_ranks: Ranks that there are.
        num_stages: Ranks that a pipeline was to have.

    >>> [stages_for(number, 4) for number in (8, 6, 4, 3, 1)]
    [4, 6, 4, 3, 1]
    >>> stages_for(10, 4)  # two replicas
    5
    """
    num_replicas = max(1, num_ranks // num_stages)
    while num_ranks % num_replicas:
        num_replicas -= 1
    return num_ranks // num_replicas
