"""The processes of one pipeline or several: devices, launchers, transport and collectives.

Global ranks count pipeline by pipeline: rank = replica * num_ranks + pipeline_rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.faults.parents import watch_launcher
from lightning_tspipe.runtime.faults.rendezvous import Job, current_job, meet, stay_on_this_machine
from lightning_tspipe.runtime.transport import shared_memory
from lightning_tspipe.runtime.transport.base import LocalNetwork, LocalTransport, Transport
from lightning_tspipe.runtime.transport.gloo import GlooTransport
from lightning_tspipe.runtime.transport.links import measure_link
from lightning_tspipe.runtime.transport.nccl import NcclWire
from lightning_tspipe.runtime.transport.ordered import OrderedTransport
from lightning_tspipe.runtime.transport.replicas import (
    Replicas,
    default_group,
    gather_among,
    make_groups,
    reduce_among,
)
from lightning_tspipe.strategy.lightning.launching import script_launcher, worker_launcher
from lightning_tspipe.strategy.lightning.namespaces import world_of

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy

    _Base = ParallelStrategy
else:
    _Base = object

_START = timedelta(minutes=2)
"""How long ranks may at least differ in their starts, such as in imports."""

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ProcessHooks(_Base):
    """The part of the strategy that starts processes and connects them.

    Args:
        num_stages: Ranks of a pipeline; None: all of them are one pipeline.
        ranks_per_device: Processes that share a device.
        timeout: How long to wait for a rank that says nothing.
        start_method: How the other processes start.
        kwargs: What every Lightning strategy takes.
    """

    def __init__(
        self,
        num_stages: int | None,
        ranks_per_device: int,
        timeout: timedelta,
        start_method: StartMethod,
        **kwargs: Any,
    ) -> None:
        _check_count(num_stages)
        self._num_stages = num_stages
        self.ranks_per_device = ranks_per_device
        super().__init__(**kwargs)
        self._timeout = timeout
        self._start_method = start_method
        self._num_nodes = 1
        self._transport: Transport | None = None
        self._replicas = Replicas()
        self._groups: tuple[Any, ...] = ()

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
        """Replicas, which is what learning-rate rules mean by it."""
        return self.num_replicas

    @property
    def total_ranks(self) -> int:
        """Processes of the job."""
        return self.num_nodes * self.num_processes

    @property
    def num_ranks(self) -> int:
        """Ranks of a pipeline."""
        return self._num_stages or max(1, self.total_ranks)

    @property
    def num_replicas(self) -> int:
        """Pipelines that train the same networks on other batches."""
        return max(1, self.total_ranks // self.num_ranks)

    @property
    def pipeline_rank(self) -> int:
        """This rank's place in its pipeline."""
        return self.global_rank % self.num_ranks

    @property
    def replica(self) -> int:
        """Which pipeline this rank belongs to."""
        return self.global_rank // self.num_ranks

    @property
    def replicas(self) -> Replicas:
        """The replicas, as this rank sees them."""
        return self._replicas

    @property
    def is_distributed(self) -> bool:
        """Whether samplers are split: over replicas, not within a pipeline."""
        return self.num_replicas > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas, "rank": self.replica}

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
        return self.pipeline_rank == self.num_ranks - 1

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank runs the losses of its pipeline; global rank 0 also logs and saves."""
        return self.pipeline_rank == LOSS_RANK

    @override
    def _configure_launcher(self) -> None:
        self._check_layout()
        assert self.cluster_environment is not None
        watch_launcher()
        if self._start_method != "popen":
            self._launcher = worker_launcher(self, self._start_method)
        elif not self.cluster_environment.creates_processes_externally and self.num_processes > 1:
            self._launcher = script_launcher(self)

    def _check_layout(self) -> None:
        number = self._num_stages
        if number is None or self.total_ranks == 0:
            return
        if self.total_ranks % number:
            raise ConfigurationError(
                f"num_stages={number}: {self.total_ranks} devices cannot be divided into pipelines "
                f"of {number}. Choose a multiple of {number} for Trainer(devices=...), or another "
                "num_stages"
            )

    def set_world_ranks(self) -> None:
        """Let this process know which rank it is; Lightning calls it before anything can fail."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.total_ranks)
        world_of(self).rank_zero_only.rank = self.global_rank

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        if self._transport is not None:
            return
        if self.total_ranks == 1:
            self._transport = LocalTransport(LocalNetwork(1), 0)
            return
        self._meet(self.cluster_environment)
        self._connect()

    def _meet(self, environment: Any) -> None:
        """Find the other ranks, look after each other from then on, and make the group of all."""
        on_one_machine = self.num_nodes == 1
        if on_one_machine:
            stay_on_this_machine()
        patience, is_first = max(self._timeout, _START), current_job() is None
        job = meet(
            environment.main_port, self.global_rank, self.total_ranks, patience,
            on_one_machine=on_one_machine,
        )  # fmt: skip
        has_failed = self.watch_others(job) if is_first else _never
        # Not in the store, whose waiting ends after the timeout: that may be short, imports long.
        job.members.wait_for_all(patience.total_seconds(), has_failed)
        world_of(self).init_dist_connection(
            environment, self.process_group_backend, timeout=self._timeout, store=job.new_store()
        )

    @abstractmethod
    def watch_others(self, job: Job) -> Callable[[], bool]:
        """From now on the other ranks can be told apart, and looked after.

        Returns:
            Whether one of them is known to have failed.
        """

    def reconnect(self, num_ranks: int) -> None:
        """Divide the ranks into other pipelines; every rank calls it, and nothing is under way.

        Args:
            num_ranks: Ranks of a pipeline from now on.
        """
        self.barrier("another mesh")
        self.transport.close()
        before = self._groups
        self._num_stages = num_ranks
        self._connect()
        for group in before:
            dist.destroy_process_group(group)

    def _connect(self) -> None:
        """Make the groups, and the transport within this rank's pipeline."""
        has_nccl = self._ordered_backend == "nccl"
        pipeline, peers = make_groups(
            self.num_ranks, self.num_replicas, "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            self._timeout, self.root_device,
        )  # fmt: skip
        self._replicas = Replicas(self.replica, self.num_replicas, peers)
        self._groups = (pipeline, peers)
        # Inside, ranks are places in this pipeline.
        with default_group(pipeline):
            self._transport = self._make_transport()
        if self.num_ranks > 1:
            self._transport.link = measure_link(self._transport, self.root_device)

    @property
    def _ordered_backend(self) -> str:
        """The backend that tensors travel by in order, without tags; "" where there is none."""
        # NCCL refuses two ranks on one GPU: then tensors go through pinned host memory.
        return "nccl" if self.root_device.type == "cuda" and self.ranks_per_device == 1 else ""

    def _make_transport(self) -> Transport:
        ranks, device = range(self.num_ranks), self.root_device
        if self.num_ranks == 1:
            return LocalTransport(LocalNetwork(1), 0)
        backend = self._ordered_backend
        if backend:
            wire = NcclWire(ranks, device, self._timeout, backend)
            return OrderedTransport(GlooTransport(ranks, device, self._timeout), wire, device)
        first = self.replica * self.num_ranks
        last = first + self.num_ranks - 1
        on_one_node = first // self.num_processes == last // self.num_processes
        if device.type == "cpu" and on_one_node and shared_memory.is_available():
            return shared_memory.SharedMemoryTransport(ranks, self._timeout, self.num_processes)
        return GlooTransport(ranks, device, self._timeout)

    # Collectives of values: among peers, so that those on the loss ranks wait for no others. Of
    # decisions: over all ranks; within a user's step, where not all of them are, among peers.

    @property
    def _is_connected(self) -> bool:
        return self._replicas.peers is not None and dist.is_initialized()

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._is_connected:
            if dist.get_backend() == dist.Backend.GLOO:
                # One that tells which rank did not come.
                dist.monitored_barrier(timeout=self._timeout, wait_all_ranks=True)
            else:
                dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self._is_connected:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.num_replicas == 1 or not isinstance(tensor, Tensor):
            return tensor
        return reduce_among(tensor, self._among(group), reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.num_replicas == 1:
            return tensor
        return gather_among(tensor, self._among(group), with_gradients=sync_grads)

    def _among(self, group: Any) -> Any:
        """The group of a collective: Lightning names the world where the user names none."""
        return self._replicas.peers if group is None or group is GroupMember.WORLD else group

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._is_connected:
            return decision
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes)
        return int(votes) == dist.get_world_size() if all else int(votes) > 0


def _check_count(num_stages: Any) -> None:
    if num_stages is not None and not (isinstance(num_stages, int) and num_stages >= 1):
        raise ConfigurationError(
            f"num_stages={num_stages!r}: the number of devices of each pipeline, from 1 on, or "
            "None for all devices"
        )


def _never() -> bool:
    """Whether a rank has failed in a job that has met, and whose later run begins."""
    return False
