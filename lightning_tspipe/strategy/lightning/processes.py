"""The processes of one pipeline or several: launchers, meeting, groups and transport."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.faults.parents import watch_launcher
from lightning_tspipe.runtime.faults.rendezvous import Job, current_job, meet, stay_on_this_machine
from lightning_tspipe.runtime.transport import shared_memory
from lightning_tspipe.runtime.transport.base import LocalNetwork, LocalTransport, Transport
from lightning_tspipe.runtime.transport.gloo import GlooTransport
from lightning_tspipe.runtime.transport.links import measure_link
from lightning_tspipe.runtime.transport.nccl import NcclWire
from lightning_tspipe.runtime.transport.ordered import OrderedTransport
from lightning_tspipe.runtime.transport.replicas import Replicas, default_group, make_groups
from lightning_tspipe.strategy.lightning.launching import script_launcher, worker_launcher
from lightning_tspipe.strategy.lightning.run import Run

_START = timedelta(minutes=2)
"""How long ranks may at least differ in their starts, such as in imports."""
_BACKEND = "gloo"
"""Of the group of all ranks; activations travel on groups of their own."""

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class Processes:
    """Starts the processes, and connects them.

    Args:
        run: The run; gets the transport and the replicas.
        start_method: How the other processes start.
        watch_others: Called when the ranks can be told apart, to look after each other from then
            on; returns what tells whether one of them is known to have failed.
    """

    def __init__(
        self,
        run: Run,
        start_method: StartMethod,
        watch_others: Callable[[Job], Callable[[], bool]],
    ) -> None:
        self._run = run
        self._start_method = start_method
        self._watch_others = watch_others
        self._groups: tuple[Any, ...] = ()

    def make_launcher(self) -> Any:
        """What starts the other processes; None where somebody else does, or there are none.

        Raises:
            ConfigurationError: The devices can't be divided into pipelines.
        """
        run, environment = self._run, self._run.lightning.cluster_environment
        number = run.num_stages
        if number is not None and run.total_ranks % number:
            raise ConfigurationError(
                f"num_stages={number}: {run.total_ranks} devices cannot be divided into pipelines "
                f"of {number}. Choose a multiple of {number} for Trainer(devices=...), or another "
                "num_stages"
            )
        assert environment is not None
        watch_launcher()
        if self._start_method != "popen":
            return worker_launcher(run.lightning, self._start_method)
        if not environment.creates_processes_externally and run.num_processes > 1:
            return script_launcher(run.lightning, run.num_processes, run.num_nodes)
        return None

    def set_up_environment(self) -> None:
        """Meet the other ranks and connect to them, once in a process."""
        run = self._run
        run.set_world_ranks()
        if run.has_transport:
            return
        if run.total_ranks == 1:
            run.transport = LocalTransport(LocalNetwork(1), 0)
            return
        self._meet(run.lightning.cluster_environment)
        self._connect()

    def _meet(self, environment: Any) -> None:
        """Find the other ranks, look after each other from then on, and make the group of all."""
        run = self._run
        on_one_machine = run.num_nodes == 1
        if on_one_machine:
            stay_on_this_machine()
        patience, is_first = max(run.timeout, _START), current_job() is None
        job = meet(
            environment.main_port, run.global_rank, run.total_ranks, patience,
            on_one_machine=on_one_machine,
        )  # fmt: skip
        has_failed = self._watch_others(job) if is_first else _never
        # Not in the store, whose waiting ends after the timeout: that may be short, imports long.
        job.members.wait_for_all(patience.total_seconds(), has_failed)
        run.lightning.namespace.init_dist_connection(
            environment, _BACKEND, timeout=run.timeout, store=job.new_store()
        )

    def reconnect(self, num_ranks: int) -> None:
        """Divide the ranks into other pipelines; every rank calls it, and nothing is under way.

        Args:
            num_ranks: Ranks of a pipeline from now on.
        """
        self._run.barrier("another mesh")
        self._run.transport.close()
        before = self._groups
        self._run.num_stages = num_ranks
        self._connect()
        for group in before:
            dist.destroy_process_group(group)

    def _connect(self) -> None:
        """Make the groups, and the transport within this rank's pipeline."""
        run, has_nccl = self._run, self._ordered_backend == "nccl"
        pipeline, peers = make_groups(
            run.num_ranks, run.num_replicas, "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            run.timeout, run.root_device,
        )  # fmt: skip
        run.replicas = Replicas(run.replica, run.num_replicas, peers)
        self._groups = (pipeline, peers)
        # Inside, ranks are places in this pipeline.
        with default_group(pipeline):
            transport = self._make_transport()
        run.transport = transport
        if run.num_ranks > 1:
            transport.link = measure_link(transport, run.root_device)

    @property
    def _ordered_backend(self) -> str:
        """The backend that tensors travel by in order, without tags; "" where there is none."""
        # NCCL refuses two ranks on one GPU: then tensors go through pinned host memory.
        is_alone = self._run.options.ranks_per_device == 1
        return "nccl" if self._run.root_device.type == "cuda" and is_alone else ""

    def _make_transport(self) -> Transport:
        run = self._run
        ranks, device, timeout = range(run.num_ranks), run.root_device, run.timeout
        if run.num_ranks == 1:
            return LocalTransport(LocalNetwork(1), 0)
        backend = self._ordered_backend
        if backend:
            wire = NcclWire(ranks, device, timeout, backend)
            return OrderedTransport(GlooTransport(ranks, device, timeout), wire, device)
        first = run.replica * run.num_ranks
        last = first + run.num_ranks - 1
        on_one_node = first // run.num_processes == last // run.num_processes
        if device.type == "cpu" and on_one_node and shared_memory.is_available():
            return shared_memory.SharedMemoryTransport(ranks, timeout, run.num_processes)
        return GlooTransport(ranks, device, timeout)


def _never() -> bool:
    """Whether a rank has failed in a job that has met, and whose later run begins."""
    return False
