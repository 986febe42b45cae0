"""Lightning's side of a run: ranks, collectives, and the state that components share."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember
from typing_extensions import override

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import ConfigurationError, TransportError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.modes.chain import Chain
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.heads import FeatureCache
from lightning_tspipe.runtime.transport.base import Alone, Transport
from lightning_tspipe.runtime.transport.replicas import Replicas, gather_among, reduce_among
from lightning_tspipe.strategy.lightning.namespaces import (
    LightningStrategy,
    StrategyArguments,
    installed_namespaces,
    namespace_of,
)
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.setup.freezing import Freezing
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.resumption import Resumption

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Run(LightningStrategy):
    """A strategy whose ranks are pipelines, and replicas of them; its components share it.

    Global ranks count pipeline by pipeline: rank = replica * num_ranks + pipeline_rank.

    Args:
        options: What the user chose.
        num_stages: Ranks of a pipeline; None: all of them are one pipeline.
        timeout: How long to wait for a rank that says nothing.
        kwargs: What every Lightning strategy takes.

    Attributes:
        options: The same; callbacks may add to them.
        num_stages: The same; another number where layers freeze and pipelines become shorter.
        timeout: The same.
        num_nodes: Machines of the job; the Trainer sets it.
        replicas: The pipelines that train the same networks, as this rank sees them.
        transport: How this rank reaches the others of its pipeline.
        has_met: Whether the ranks have met, and can be reached.
        engine: What runs this rank's stages; None before the first batch.
        spread: That of a training which is over, if its stages stay spread over the ranks.
        resumption: Where the run goes on, and by which plan.
        freezing: What is frozen, and what is known about the step.
        features: Keeps what the trunk of heads returns for a sample, in the coming fit; None: the
            trunk makes all of them.
        seconds_reading: How long this rank has read training batches, in all.
        shortest_reading: How long it has read the batch that took the least; 0 before the first.
        stop: What ranks were asked to do, by signals.
        recorder: Notes what this rank does while a window is recorded.
        reduces: Whether a backward ends with gradients that are means over the replicas; not while
            they are only added up.
        ends_together: Whether an exception that ends the run is one that all ranks share.
        have_workers_failed: Whether, in the parent of workers, one of them has failed.
    """

    def __init__(
        self,
        options: SetupOptions,
        num_stages: int | None,
        timeout: timedelta,
        **kwargs: Unpack[StrategyArguments],
    ) -> None:
        given: Any = num_stages
        if given is not None and not (isinstance(given, int) and given >= 1):
            raise ConfigurationError(
                f"num_stages={num_stages!r}: the number of devices of each pipeline, from 1 on, or "
                "None for all devices"
            )
        self.namespace = installed_namespaces()[0]
        self.options = options
        self.num_stages = num_stages
        self.timeout = timeout
        self.num_nodes = 1
        self.replicas = Replicas()
        self.transport: Transport = Alone()
        self.has_met = False
        self.engine: Engine | None = None
        self.spread: Engine | None = None
        self.resumption = Resumption()
        self.freezing = Freezing()
        self.features: FeatureCache | None = None
        self.seconds_reading = self.shortest_reading = 0.0
        self.stop = Stop()
        self.recorder = Recorder()
        self.reduces = True
        self.ends_together = self.have_workers_failed = False
        super().__init__(**kwargs)

    # Lightning's objects

    @property
    def module(self) -> LightningModule:
        """The user's module."""
        module = self.lightning_module
        assert module is not None
        return module

    @property
    def trainer(self) -> Trainer:
        """The Trainer."""
        return self.module.trainer

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

    # Ranks

    def rank(self, networks: Networks | None = None) -> Rank:
        """This rank, before anything is placed; every rank calls it.

        Args:
            networks: The names of the networks; None: as they are declared, or found.
        """
        networks = networks or find_networks(self.module, self.options)
        seed = self.transport.broadcast_object(torch.initial_seed() % 2**31, LOSS_RANK)
        return Rank(
            self.module, networks, self.transport, self.root_device, Chain(), seed,
            self.precision_plugin.forward_context, self.replicas, None, self.stop, self.recorder,
        )  # fmt: skip

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def total_ranks(self) -> int:
        """Processes of the job."""
        return self.num_nodes * self.num_processes

    @property
    def num_ranks(self) -> int:
        """Ranks of a pipeline."""
        return self.num_stages or max(1, self.total_ranks)

    @property
    def num_replicas(self) -> int:
        """Pipelines that train the same networks on other batches."""
        return max(1, self.total_ranks // self.num_ranks)

    @property
    @override
    def world_size(self) -> int:
        """Replicas, which is what learning-rate rules mean by it."""
        return self.num_replicas

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas, "rank": self.replica}

    @property
    def pipeline_rank(self) -> int:
        """This rank's place in its pipeline."""
        return self.global_rank % self.num_ranks

    @property
    def replica(self) -> int:
        """Which pipeline this rank belongs to."""
        return self.global_rank // self.num_ranks

    def set_world_ranks(self) -> None:
        """Let this process know which rank it is; Lightning calls it before anything can fail."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.total_ranks)
        self.namespace.rank_zero_only.rank = self.global_rank

    @property
    def data_rank(self) -> int:
        """The rank of each pipeline that reads the data."""
        return self.num_ranks - 1

    @property
    def is_data_rank(self) -> bool:
        """Whether this rank reads the data."""
        return self.pipeline_rank == self.data_rank

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank runs the losses of its pipeline; global rank 0 also logs and saves."""
        return self.pipeline_rank == LOSS_RANK

    @property
    def placed(self) -> Engine | None:
        """The engine that has the stages; of a training that is over, if they stay spread."""
        return self.engine or self.spread

    # All ranks at once. Where one of them may be gone, nobody waits.

    @property
    def is_failing(self) -> bool:
        """Whether this rank ends by an exception that the others don't share.

        Then they may be gone: nothing can be collected from them, and nobody is to be waited for.
        """
        # Its property raises where it is not attached yet, as in the parent of workers.
        trainer = getattr(self.lightning_module, "_trainer", None)
        interrupted = trainer is not None and trainer.interrupted
        failing = interrupted and self.total_ranks > 1 and not self.ends_together
        return failing or self.have_workers_failed

    @property
    def is_connected(self) -> bool:
        """Whether there are other ranks, and this one has met them."""
        return self.replicas.peers is not None and dist.is_initialized()

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have come here.

        Raises:
            TransportError: One of them ended, or came nowhere for too long.
        """
        if self.is_failing or not self.is_connected:
            return
        try:
            if dist.get_backend() == dist.Backend.GLOO:
                # One that tells which rank did not come.
                dist.monitored_barrier(timeout=self.timeout, wait_all_ranks=True)
            else:
                dist.barrier()
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.global_rank} waited at the barrier {name!r} for a rank that ended or "
                f"stalled ({first_line(error)})"
            ) from error

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """A rank's value, on all ranks."""
        if self.is_failing or not self.is_connected:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say so, or any of them."""
        if not self.is_connected:
            return decision
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes)
        return int(votes) == dist.get_world_size() if all else int(votes) > 0

    # Collectives of values: among peers, so that those on the loss ranks wait for no others.

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
        return self.replicas.peers if group is None or group is GroupMember.WORLD else group
