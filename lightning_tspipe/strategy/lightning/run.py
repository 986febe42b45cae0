"""State of a run that components of the strategy share: Lightning's objects, ranks, the engine."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_tspipe.errors import ConfigurationError, TransportError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.faults.failures import first_line
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.strategy.lightning.base import LightningStrategy
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.plan_of_run import PlanOfRun

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import Precision
    from torch.optim import Optimizer


class Run:
    """The state that components share, on this rank.

    Global ranks count pipeline by pipeline: rank = replica * num_ranks + pipeline_rank.

    Args:
        lightning: The strategy, as Lightning knows it.
        options: What the user chose.
        num_stages: Ranks of a pipeline; None: all of them are one pipeline.
        timeout: How long to wait for a rank that says nothing.

    Attributes:
        lightning: The same.
        options: The same; callbacks may add to them.
        num_stages: The same; another number where layers freeze and pipelines become shorter.
        timeout: The same.
        num_nodes: Machines of the job.
        replicas: The pipelines that train the same networks, as this rank sees them.
        engine: What runs this rank's stages; None before the first batch.
        spread: That of a training which is over, if its stages stay spread over the ranks.
        plan: The plan that the run goes by.
        stop: What ranks were asked to do, by signals.
        recorder: Notes what this rank does while a window is recorded.
        reduces: Whether a backward ends with gradients that are means over the replicas; not while
            they are only added up.
        ends_together: Whether an exception that ends the run is one that all ranks share.
        have_workers_failed: Whether, in the parent of workers, one of them has failed.
    """

    def __init__(
        self,
        lightning: LightningStrategy,
        options: SetupOptions,
        num_stages: int | None,
        timeout: timedelta,
    ) -> None:
        _check_count(num_stages)
        self.lightning = lightning
        self.options = options
        self.num_stages = num_stages
        self.timeout = timeout
        self.num_nodes = 1
        self.replicas = Replicas()
        self._transport: Transport | None = None
        self.engine: Engine | None = None
        self.spread: Engine | None = None
        self.plan = PlanOfRun()
        self.stop = Stop()
        self.recorder = Recorder()
        self.reduces = True
        self.ends_together = self.have_workers_failed = False

    # Lightning's objects

    @property
    def module(self) -> LightningModule:
        """The user's module."""
        module = self.lightning.lightning_module
        assert module is not None
        return module

    @property
    def trainer(self) -> Trainer:
        """The Trainer."""
        return self.module.trainer

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return self.lightning.root_device

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin."""
        return self.lightning.precision_plugin

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, of all parameters."""
        return self.lightning.optimizers

    # Ranks

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.lightning.parallel_devices or ())

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
    def global_rank(self) -> int:
        """This rank's number in the job."""
        return self.lightning.global_rank

    @property
    def pipeline_rank(self) -> int:
        """This rank's place in its pipeline."""
        return self.global_rank % self.num_ranks

    @property
    def replica(self) -> int:
        """Which pipeline this rank belongs to."""
        return self.global_rank // self.num_ranks

    def set_world_ranks(self) -> None:
        """Let this process know which rank it is; before anything can fail."""
        lightning = self.lightning
        environment = lightning.cluster_environment
        if environment is not None:
            rank = lightning.node_rank * self.num_processes + lightning.local_rank
            environment.set_global_rank(rank)
            environment.set_world_size(self.total_ranks)
        lightning.namespace.rank_zero_only.rank = self.global_rank

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
    def is_global_zero(self) -> bool:
        """Whether this rank logs and saves."""
        return self.global_rank == 0

    @property
    def transport(self) -> Transport:
        """How this rank reaches the others of its pipeline."""
        assert self._transport is not None
        return self._transport

    @transport.setter
    def transport(self, transport: Transport | None) -> None:
        self._transport = transport

    @property
    def has_transport(self) -> bool:
        """Whether the ranks have met."""
        return self._transport is not None

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
        trainer = getattr(self.lightning.lightning_module, "_trainer", None)
        interrupted = trainer is not None and trainer.interrupted
        failing = interrupted and self.total_ranks > 1 and not self.ends_together
        return failing or self.have_workers_failed

    @property
    def is_connected(self) -> bool:
        """Whether there are other ranks, and this one has met them."""
        return self.replicas.peers is not None and dist.is_initialized()

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

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """A rank's value, on all ranks."""
        if self.is_failing or not self.is_connected:
            return value
        box = [value]
        dist.broadcast_object_list(box, source)
        return box[0]

    def decide(self, decision: bool, *, unanimous: bool) -> bool:
        """Whether all ranks say so, or any of them."""
        if not self.is_connected:
            return decision
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes)
        return int(votes) == dist.get_world_size() if unanimous else int(votes) > 0


def _check_count(num_stages: Any) -> None:
    if num_stages is not None and not (isinstance(num_stages, int) and num_stages >= 1):
        raise ConfigurationError(
            f"num_stages={num_stages!r}: the number of devices of each pipeline, from 1 on, or "
            "None for all devices"
        )
