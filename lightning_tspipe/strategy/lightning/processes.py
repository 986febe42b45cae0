"""A run's processes, of one pipeline or several: launchers, meeting, groups and transport."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.faults.local_processes import watch_launcher
from lightning_tspipe.runtime.faults.rendezvous import Job, current_job, meet, stay_on_this_machine
from lightning_tspipe.runtime.transport.base import Alone, Transport
from lightning_tspipe.runtime.transport.replicas import Replicas, default_group, make_groups
from lightning_tspipe.runtime.transport.shared_memory import SharedMemoryTransport
from lightning_tspipe.runtime.transport.wired import GlooTransport, NcclWire, OrderedTransport
from lightning_tspipe.strategy.lightning.launching import WORKER_LAUNCHERS, script_launcher
from lightning_tspipe.strategy.lightning.run import Run

_START = timedelta(minutes=2)
"""How long ranks may at least differ in their starts, such as in imports."""
_BACKEND = "gloo"
"""Of the group of all ranks; activations travel on groups of their own."""


class ConnectedRun(Run):
    """A run that starts the processes of the other ranks, and connects to them."""

    _own_groups: tuple[Any, ...] = ()
    """Of this rank's pipeline, and of its peers."""

    @override
    def _configure_launcher(self) -> None:
        """Choose what starts the other processes; None where somebody else does, or there are none.

        Raises:
            ConfigurationError: The devices can't be divided into pipelines.
        """
        environment, method = self.cluster_environment, self.options.start_method
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

    def join(self, watch_others: Callable[[Job], Callable[[], bool]]) -> None:
        """Meet the other ranks and connect to them, once in a process.

        Args:
            watch_others: Called when the ranks can be told apart, to look after each other from
                then on; returns what tells whether one of them is known to have failed.
        """
        self.set_world_ranks()
        if self.has_met:
            return
        if self.total_ranks > 1:
            self._meet(watch_others)
            self._connect()
        self.has_met = True

    def _meet(self, watch_others: Callable[[Job], Callable[[], bool]]) -> None:
        """Find the other ranks, look after each other from then on, and make the group of all."""
        environment: Any = self.cluster_environment
        on_one_machine = self.num_nodes == 1
        if on_one_machine:
            stay_on_this_machine()
        patience, is_first = max(self.timeout, _START), current_job() is None
        job = meet(
            environment.main_port, self.global_rank, self.total_ranks, patience,
            on_one_machine=on_one_machine,
        )  # fmt: skip
        if is_first:
            # Not in the store, whose waiting ends after the timeout: that may be short, imports
            # long.
            job.wait_for_all(patience.total_seconds(), watch_others(job))
        self.namespace.init_dist_connection(
            environment, _BACKEND, timeout=self.timeout, store=job.new_store()
        )

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
        pipeline, peers = make_groups(
            self.num_ranks, self.num_replicas, "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            self.timeout, self.root_device,
        )  # fmt: skip
        self.replicas = Replicas(self.replica, self.num_replicas, peers)
        self._own_groups = (pipeline, peers)
        # Inside, ranks are places in this pipeline.
        with default_group(pipeline):
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
            wire = NcclWire(device, timeout, backend)
            return OrderedTransport(GlooTransport(device, timeout), wire, device)
        first = self.replica * self.num_ranks
        last = first + self.num_ranks - 1
        on_one_node = first // self.num_processes == last // self.num_processes
        if device.type == "cpu" and on_one_node and hasattr(os, "memfd_create"):
            return SharedMemoryTransport(timeout, self.num_processes)
        return GlooTransport(device, timeout)
