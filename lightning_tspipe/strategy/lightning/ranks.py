"""Devices, ranks and collectives of the strategy, in Lightning's words."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import GroupMember
from typing_extensions import override

from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import gather_among, reduce_among
from lightning_tspipe.strategy.lightning.base import LightningStrategy, StrategyArguments
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces, namespace_of
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.options import SetupOptions


class RankedStrategy(LightningStrategy):
    """A strategy whose ranks are pipelines, and replicas of them.

    Args:
        options: What the user chose.
        num_stages: Ranks of a pipeline; None: all of them are one pipeline.
        timeout: How long to wait for a rank that says nothing.
        kwargs: What every Lightning strategy takes.

    Attributes:
        run: What components share.
    """

    def __init__(
        self,
        options: SetupOptions,
        num_stages: int | None,
        timeout: timedelta,
        **kwargs: Unpack[StrategyArguments],
    ) -> None:
        self.namespace = installed_namespaces()[0]
        self.run = Run(self, options, num_stages, timeout)
        super().__init__(**kwargs)

    @property
    def options(self) -> SetupOptions:
        """What the user chose."""
        return self.run.options

    @property
    def transport(self) -> Transport:
        """How this rank reaches the others of its pipeline."""
        return self.run.transport

    @property  # type: ignore[explicit-override] # of the setter; it is below
    @override
    def accelerator(self) -> Any:
        """The first thing that a Trainer hands over; it tells the namespace."""
        return self._accelerator

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        if accelerator is not None:
            self.namespace = namespace_of(type(accelerator).__module__)

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property  # type: ignore[explicit-override] # of the setter; it is below
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The device of each process on this machine."""
        devices, number = self._parallel_devices, self.options.ranks_per_device
        return None if devices is None else [each for each in devices for _ in range(number)]

    @parallel_devices.setter
    @override
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    @property
    def num_nodes(self) -> int:
        """Machines of the job; the Trainer sets it."""
        return self.run.num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self.run.num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return self.run.num_processes

    @property
    def num_ranks(self) -> int:
        """Ranks of a pipeline."""
        return self.run.num_ranks

    @property
    @override
    def world_size(self) -> int:
        """Replicas, which is what learning-rate rules mean by it."""
        return self.run.num_replicas

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.run.num_replicas, "rank": self.run.replica}

    def set_world_ranks(self) -> None:
        """Let this process know which rank it is; Lightning calls it before anything can fail."""
        self.run.set_world_ranks()

    # Collectives of values: among peers, so that those on the loss ranks wait for no others. Of
    # decisions: over all ranks; within a user's step, where not all of them are, among peers.

    @override
    def barrier(self, name: str | None = None) -> None:
        self.run.barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.run.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.run.num_replicas == 1 or not isinstance(tensor, Tensor):
            return tensor
        return reduce_among(tensor, self._among(group), reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.run.num_replicas == 1:
            return tensor
        return gather_among(tensor, self._among(group), with_gradients=sync_grads)

    def _among(self, group: Any) -> Any:
        """The group of a collective: Lightning names the world where the user names none."""
        return self.run.replicas.peers if group is None or group is GroupMember.WORLD else group

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.run.decide(decision, unanimous=all)
