"""Lightning's side of a run: ranks, their processes, collectives, and what components share."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed import GroupMember
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import ConfigurationError, TransportError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.planning.placement import default_ranks
from lightning_tspipe.runtime.execution.engine import Engine, Rank
from lightning_tspipe.runtime.faults.failures import Failures, first_line
from lightning_tspipe.runtime.faults.local_processes import watch_instead, watch_launcher
from lightning_tspipe.runtime.faults.rendezvous import Job, current_job, meet, tidy_before_sigterm
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.heads import FeatureCache
from lightning_tspipe.runtime.transport import replicas
from lightning_tspipe.runtime.transport.base import Alone, Transport
from lightning_tspipe.runtime.transport.shared_memory import SharedMemoryTransport
from lightning_tspipe.runtime.transport.wired import GlooTransport, NcclWire, OrderedTransport
from lightning_tspipe.runtime.weights.ownership import Follower
from lightning_tspipe.strategy.lightning import torchrun
from lightning_tspipe.strategy.lightning.launching import WORKER_LAUNCHERS, script_launcher
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

_START = timedelta(minutes=2)
"""How long ranks may at least differ in their starts, such as in imports."""
_BACKEND = "gloo"
"""Of the group of all ranks; activations travel on groups of their own."""


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
        failures: What is known of other ranks' failures; None where there are no others.
        engine: What runs this rank's stages; None before the first batch.
        spread: That of a training which is over, if its stages stay spread over the ranks.
        resumption: Where the run goes on, and by which plan.
        freezing: What is frozen, and what is known about the step.
        features: Keeps what the trunk of heads returns for a sample, in the coming fit; None: the
            trunk makes all of them.
        found: The networks that the first step has told of; None where they are named.
        followers: Copies of the module that callbacks keep; they lie as it does.
        table: What is pipelined, for people; "" before the first batch.
        summary: The same, with stages and ranks.
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
                f"num_stages={num_stages!r} must be the number of devices of each pipeline, at "
                "least 1, or None for all devices"
            )
        self.namespace = installed_namespaces()[0]
        self.options = options
        self.num_stages = num_stages
        self.timeout = timeout
        self.num_nodes = 1
        self.replicas = replicas.Replicas()
        self.transport: Transport = Alone()
        self.has_met = False
        self.failures: Failures | None = None
        self.engine: Engine | None = None
        self.spread: Engine | None = None
        self.resumption = Resumption()
        self.freezing = Freezing()
        self.features: FeatureCache | None = None
        self.found: Networks | None = None
        self.followers: tuple[Follower, ...] = ()
        self.table = self.summary = ""
        self.seconds_reading = self.shortest_reading = 0.0
        self.stop = Stop()
        self.recorder = Recorder()
        self.reduces = True
        self.ends_together = self.have_workers_failed = False
        self._own_groups: tuple[Any, ...] = ()  # of this rank's pipeline, and of its peers
        super().__init__(**kwargs)

    @override
    def __repr__(self) -> str:
        stages = "" if self.num_stages is None else f", num_stages={self.num_stages}"
        return f"{type(self).__name__}(schedule={self.options.schedule!r}{stages})"

    @override
    def __str__(self) -> str:
        """What is pipelined, as ``trainer.print(trainer.strategy)`` shows it: a table.

        After a run it is that of the run.
        """
        if not self.summary:
            return f"{self!r}: stages are placed with the first batch"
        ranks = f"{self.num_ranks} ranks"
        if self.num_replicas > 1:
            ranks = f"{self.num_replicas} replicas of {ranks}"
        return f"{self!r} on {ranks}\n\n{self.summary}"

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

    def timed(self, part: str) -> AbstractContextManager[Any]:
        """While inside, the Trainer's profiler times a part of what the strategy does.

        Args:
            part: Its name, behind that of the class, as Lightning writes it.
        """
        trainer: Any = self.trainer
        inside: AbstractContextManager[Any] = trainer.profiler.profile(
            f"[Strategy]{type(self).__name__}.{part}"
        )
        return inside

    # Ranks

    @property
    def networks(self) -> Networks:
        """The names of the networks: as a step has told them, or as they are named.

        Raises:
            ConfigurationError: They have no names, and no step has been seen.
        """
        return self.found or find_networks(self.module, self.options)

    def rank(self, networks: Networks | None = None) -> Rank:
        """This rank, before anything is placed; every rank calls it.

        Args:
            networks: The names of the networks; None: as they are declared, or found.
        """
        networks = networks or self.networks
        seed = self.transport.broadcast_object(torch.initial_seed() % 2**31, LOSS_RANK)
        return Rank(
            self.module, networks, self.transport, self.root_device, seed=seed,
            context=self.precision_plugin.forward_context, replicas=self.replicas, stop=self.stop,
            recorder=self.recorder, followers=self.followers,
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
    def device_mesh(self) -> DeviceMesh:
        """The ranks by replicas (``dp``) and their places in a pipeline (``pp``), of shape R x P.

        ``device_mesh["dp"]`` is made of the ranks with the same stages, ``device_mesh["pp"]`` of
        this rank's pipeline, whose group computes on the host. A mesh is of the groups that there
        are: one that was taken before ``FreezeAndRepack`` has moved to fewer ranks is out of date.

        Raises:
            RuntimeError: The processes don't know each other yet, or not any more, or there is
                only one.
        """
        if not (self._own_groups and dist.is_initialized()):
            raise RuntimeError(
                "there is no device mesh: it is there in hooks (from setup on) of runs with "
                "several ranks"
            )
        pipeline, peers = self._own_groups
        ranks = torch.arange(self.total_ranks).view(self.num_replicas, self.num_ranks)
        return DeviceMesh.from_group(
            [peers, pipeline], self.root_device.type, ranks, mesh_dim_names=("dp", "pp")
        )

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
        return default_ranks(1, self.num_ranks, self.options.schedule)[0]

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

    # Processes: launched, met, connected

    @override
    def _configure_launcher(self) -> None:
        """Choose what starts the other processes; None where somebody else does, or there are none.

        Raises:
            ConfigurationError: The devices can't be divided into pipelines, or are not as many as
                torchrun has started processes.
        """
        environment, method = self.cluster_environment, self.options.start_method
        if isinstance(environment, self.namespace.torchrun):
            self._follow_torchrun()
        number = self.num_stages
        if number is not None and self.total_ranks % number:
            raise ConfigurationError(
                f"num_stages={number}: {self.total_ranks} devices cannot be divided into pipelines "
                f"of {number}. Choose a multiple of {number} for Trainer(devices=...), or another "
                "num_stages"
            )
        assert environment is not None
        watch_launcher()
        if method != "popen":
            self._launcher = WORKER_LAUNCHERS[self.namespace.name](self, start_method=method)
        elif not environment.creates_processes_externally and self.num_processes > 1:
            self._launcher = script_launcher(self)

    def _follow_torchrun(self) -> None:
        """Take the numbers of nodes and devices from torchrun, and divide what there is.

        Raises:
            ConfigurationError: The Trainer says otherwise.
        """
        world, devices = torchrun.started_world(), self._parallel_devices
        if world is None or not devices:
            return
        self.num_nodes = world.nodes(self.num_nodes)
        auto = self.accelerator.auto_device_count()
        self._parallel_devices = world.devices(devices, auto, self.options.ranks_per_device)
        wanted, total = self.num_stages, self.total_ranks
        if wanted is not None and total % wanted:
            # Not refused: nobody may be there when a node is lost.
            self.num_stages = torchrun.stages_for(total, wanted)
            rank_zero_warn(
                f"num_stages={wanted} does not divide the {total} devices that torchrun has "
                f"started: {total // self.num_stages} pipelines of {self.num_stages} are planned"
            )

    def join(self) -> None:
        """Meet the other ranks and connect to them, once in a process."""
        self.set_world_ranks()
        if self.has_met:
            return
        if self.total_ranks > 1:
            self._meet()
            self._connect()
        else:
            tidy_before_sigterm()
        self.has_met = True

    def _meet(self) -> None:
        """Find the other ranks, look after each other from then on, and make the group of all."""
        environment: Any = self.cluster_environment
        patience, is_first = max(self.timeout, _START), current_job() is None
        was_connected = dist.is_initialized()
        job = meet(
            environment.main_port, self.global_rank, self.total_ranks, patience,
            on_one_machine=self.num_nodes == 1,
        )  # fmt: skip
        if is_first:
            # Not in the store, whose waiting ends after the timeout: that may be short, imports
            # long.
            failures = self.look_after_others(job)
            watch_instead()
            job.wait_for_all(patience.total_seconds(), failures.has_failed)
        if is_first and was_connected:
            # By somebody else, such as Ray: that group may be NCCL's, which takes no tensors of the
            # host, and waits for as long as somebody else thought right.
            world: Any = dist.new_group(timeout=self.timeout, backend=_BACKEND)
            GroupMember.WORLD = world
        self.namespace.init_dist_connection(
            environment, _BACKEND, timeout=self.timeout, store=job.new_store()
        )

    @property
    def started(self) -> Any:
        """The processes that this one has started for other ranks."""
        return getattr(self.launcher, "procs", ())

    def failures_of(self, job: Job) -> Failures:
        """What the ranks of a job know of each other's failures, in a run that begins."""
        # A launcher that starts functions tells of the process that ended first, and no other.
        ends_last = self.options.start_method != "popen"
        return Failures(job, self.timeout.total_seconds(), self.started, ends_last=ends_last)

    def look_after_others(self, job: Job) -> Failures:
        """From now on the other ranks can be told apart: look after each other."""
        failures = self.failures = self.failures_of(job)
        failures.watch()
        job.tell = failures.tell_of_signal
        return failures

    def reconnect(self, num_ranks: int) -> None:
        """Divide the ranks into other pipelines; every rank calls it, and nothing is under way.

        Args:
            num_ranks: Ranks of a pipeline from now on.
        """
        self.barrier("another mesh")
        self.transport.close()
        before = self._own_groups
        self.num_stages = num_ranks
        self._connect()
        for group in before:
            dist.destroy_process_group(group)

    def _connect(self) -> None:
        """Make the groups, and the transport within this rank's pipeline."""
        has_nccl = self._ordered_backend == "nccl"
        pipeline, peers = replicas.make_groups(
            self.num_ranks, self.num_replicas, "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            self.timeout, self.root_device,
        )  # fmt: skip
        self.replicas = replicas.Replicas(self.replica, self.num_replicas, peers)
        self._own_groups = (pipeline, peers)
        # Inside, ranks are places in this pipeline.
        with replicas.default_group(pipeline):
            transport = self._make_transport()
        self.transport = transport
        if self.num_ranks > 1:
            transport.measure_link(self.root_device)

    @property
    def _ordered_backend(self) -> str:
        """The backend that tensors travel by in order, without tags; "" where there is none."""
        # NCCL refuses two ranks on one GPU: then tensors go through pinned host memory.
        is_alone = self.options.ranks_per_device == 1
        return "nccl" if self.root_device.type == "cuda" and is_alone else ""

    def _make_transport(self) -> Transport:
        device, timeout = self.root_device, self.timeout
        if self.num_ranks == 1:
            return Alone()
        backend = self._ordered_backend
        if backend:
            beside = GlooTransport(device, timeout)
            return OrderedTransport(beside, NcclWire(device, timeout, backend), device)
        first = self.replica * self.num_ranks
        last = first + self.num_ranks - 1
        on_one_node = first // self.num_processes == last // self.num_processes
        if device.type == "cpu" and on_one_node and hasattr(os, "memfd_create"):
            return SharedMemoryTransport(timeout, self.num_processes)
        return GlooTransport(device, timeout)

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
        return replicas.reduce_among(tensor, self._among(group), reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.num_replicas == 1:
            return tensor
        return replicas.gather_among(tensor, self._among(group), with_gradients=sync_grads)

    def _among(self, group: Any) -> Any:
        """The group of a collective: Lightning names the world where the user names none."""
        return self.replicas.peers if group is None or group is GroupMember.WORLD else group
