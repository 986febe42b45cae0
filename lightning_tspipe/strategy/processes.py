"""The processes of a pipeline: devices, launchers, transport and collectives."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.runtime import shared_memory
from lightning_tspipe.runtime.executor import BATCH_CHANNEL
from lightning_tspipe.runtime.nccl import NcclTransport
from lightning_tspipe.runtime.transport import (
    GlooTransport,
    LocalNetwork,
    LocalTransport,
    Transport,
)
from lightning_tspipe.runtime.weights import LOSS_RANK
from lightning_tspipe.strategy.worlds import world_of

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy

    _Base = ParallelStrategy
else:
    _Base = object

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ProcessHooks(_Base):
    """The part of the strategy that starts processes and connects them.

    Args:
        ranks_per_device: Processes that share a device.
        timeout: How long to wait for a rank that says nothing.
        start_method: How the other processes start.
        kwargs: What every Lightning strategy takes.
    """

    def __init__(
        self, ranks_per_device: int, timeout: timedelta, start_method: StartMethod, **kwargs: Any
    ) -> None:
        self.ranks_per_device = ranks_per_device
        super().__init__(**kwargs)
        self._timeout = timeout
        self._start_method = start_method
        self._num_nodes = 1
        self._transport: Transport | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property  # type: ignore[explicit-override] # of the setter; it is below
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The device of each process on this machine."""
        devices = self._parallel_devices
        if devices is None:
            return None
        return [device for device in devices for _ in range(self.ranks_per_device)]

    @parallel_devices.setter
    @override
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    @property
    def num_nodes(self) -> int:
        """Machines of the job."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def world_size(self) -> int:
        """Replicas, which is what learning-rate rules mean by it.

        Lightning's training loop means it too: above 1 it broadcasts before every batch whether a
        SIGTERM came, and no rank could start a step before rank 0 has ended the last one.
        """
        return 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.num_nodes * self.num_processes

    @property
    def is_distributed(self) -> bool:
        """Whether samplers are split over ranks: not within a pipeline."""
        return False

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @property
    def process_group_backend(self) -> str:
        """Backend of the world group; activations travel on groups of their own."""
        return "gloo"

    @property
    def transport(self) -> Transport:
        """How this rank reaches the others."""
        assert self._transport is not None
        return self._transport

    @property
    def is_data_rank(self) -> bool:
        """Whether this rank reads the data."""
        return self.global_rank == self.num_ranks - 1

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank runs the losses, logs and saves."""
        return self.global_rank == LOSS_RANK

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        launchers = world_of(self).launchers
        if self._start_method != "popen":
            self._launcher = launchers.multiprocessing._MultiProcessingLauncher(  # noqa: SLF001
                self, start_method=self._start_method
            )
        elif not self.cluster_environment.creates_processes_externally and self.num_processes > 1:
            self._launcher = launchers.subprocess_script._SubprocessScriptLauncher(  # noqa: SLF001
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        environment = self.cluster_environment
        assert environment is not None
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_ranks)
        world_of(self).rank_zero_only.rank = self.global_rank
        if self._transport is not None:
            return
        if self.num_ranks == 1:
            self._transport = LocalTransport(LocalNetwork(1), 0)
            return
        if self.num_nodes == 1:
            # Nothing outside of this machine needs to reach the job.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        world_of(self).init_dist_connection(
            environment, self.process_group_backend, timeout=self._timeout
        )
        self._transport = self._make_transport()

    def _make_transport(self) -> Transport:
        ranks, device = range(self.num_ranks), self.root_device
        if device.type == "cuda" and self.ranks_per_device == 1:
            return NcclTransport(ranks, device, self._timeout, frozenset({BATCH_CHANNEL}))
        if device.type == "cpu" and self.num_nodes == 1 and shared_memory.is_available():
            return shared_memory.SharedMemoryTransport(ranks, self._timeout)
        # NCCL refuses two ranks on one GPU: then tensors go through pinned host memory.
        return GlooTransport(ranks, device, self._timeout)

    # Collectives: over the loss ranks of the replicas, of which there is one

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and self.num_ranks > 1:
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or self.num_ranks == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not dist.is_initialized() or self.num_ranks == 1:
            return decision
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes)
        return int(votes) == self.num_ranks if all else int(votes) > 0
