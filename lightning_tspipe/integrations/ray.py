"""Ray Train: the workers of a ``TorchTrainer`` are a pipeline's ranks; needs the extra ``ray``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.integrations.nodes import check_nodes
from lightning_tspipe.strategy.setup.refusals import refuse
from lightning_tspipe.strategy.strategy import TSPipeStrategy

try:
    import ray.train.lightning
    import ray.train.torch
except ImportError as error:
    raise ImportError(
        "lightning_tspipe.integrations.ray needs Ray Train: pip install "
        f'"lightning-tspipe[ray]" ({error})'
    ) from error

__all__ = ["RayTSPipeStrategy", "prepare_trainer"]

log = logging.getLogger("lightning_tspipe")


@dataclass(frozen=True)
class _Worker:
    """This process among Ray's workers.

    Attributes:
        num_workers: Workers of the job.
        num_here: Those on this node.
        node: Number of the node.
        device: What Ray has given to this one.
    """

    num_workers: int
    num_here: int
    node: int
    device: torch.device

    @classmethod
    def of_this_process(cls) -> _Worker:
        """What Ray says of this process.

        Raises:
            ConfigurationError: It is none of Ray's workers.
        """
        try:
            context = ray.train.get_context()
            return cls(
                context.get_world_size(), context.get_local_world_size(), context.get_node_rank(),
                ray.train.torch.get_device(),
            )  # fmt: skip
        except RuntimeError as error:
            raise ConfigurationError(
                "RayTSPipeStrategy runs in the workers of Ray Train, and this process is none of "
                "them. Make the Trainer in the function that ray.train.torch.TorchTrainer gets, or "
                'use strategy="tspipe"'
            ) from error


class RayTSPipeStrategy(TSPipeStrategy):
    """Pipelines the student and the teacher over the workers of Ray Train's ``TorchTrainer``.

    It takes the place of Ray's own strategies, such as ``RayDDPStrategy``, and the arguments of
    ``TSPipeStrategy``. Ray starts the processes and gives each a device, so that ``start_method``
    has no meaning here, and the Trainer's ``devices`` and ``num_nodes`` are Ray's. Every node has
    the same number of workers; ``num_stages`` that divides it keeps each pipeline on a node.

    Raises:
        ConfigurationError: The process is none of Ray's workers; the Trainer has no
            ``RayLightningEnvironment``; the workers aren't connected, can't be divided into
            pipelines, or are unequally many on the nodes; or a ``start_method`` is given.
    """

    @cached_property
    def _worker(self) -> _Worker:
        return _Worker.of_this_process()

    # Devices and ranks are Ray's

    @property
    @override
    def root_device(self) -> torch.device:
        return self._worker.device

    @property  # type: ignore[explicit-override] # of the setter; it is below
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """This worker's device, once for each worker of its node: only their number is used."""
        return [self.root_device] * self.num_processes

    @parallel_devices.setter
    @override
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        """Leave what the Trainer has found: it sees the devices of the node, or one CPU."""

    @property
    @override
    def num_processes(self) -> int:
        """Workers on this node."""
        return self._worker.num_here

    @property
    @override
    def total_ranks(self) -> int:
        """Workers of the job."""
        return self._worker.num_workers

    @property  # type: ignore[explicit-override] # of the setter; it is below
    @override
    def num_nodes(self) -> int:
        """Nodes, each with the same number of workers."""
        return self.total_ranks // self.num_processes

    @num_nodes.setter
    @override
    def num_nodes(self, num_nodes: int) -> None:
        """Leave what the Trainer was given: Ray knows better."""

    # Processes

    @override
    def _configure_launcher(self) -> None:
        """Look whether Ray's workers can be the ranks; there is nothing to launch.

        Raises:
            ConfigurationError: They can't.
        """
        environment, number = self.cluster_environment, self.num_stages or 1
        refuse({
            f"{type(environment).__name__} can't tell which of Ray's workers this is. Give the "
            "Trainer plugins=[RayLightningEnvironment()], of ray.train.lightning; or "
            "RayTSPipeStrategy(cluster_environment=RayLightningEnvironment())":
            not isinstance(environment, ray.train.lightning.RayLightningEnvironment),
            f"start_method={self.options.start_method!r}: Ray starts the processes. Leave it out":
            self.options.start_method != "popen",
            f"Ray's {self.total_ranks} workers aren't connected by torch.distributed. Start them "
            "with ray.train.torch.TorchTrainer": self.total_ranks > 1 and not dist.is_initialized(),
            f"num_stages={number}: {self.total_ranks} workers cannot be divided into pipelines of "
            f"{number}. Choose a multiple of {number} for ScalingConfig(num_workers=...), or "
            "another num_stages": bool(self.total_ranks % number),
        })  # fmt: skip

    @override
    def join(self) -> None:
        """Meet the other workers, once in a process.

        Raises:
            ConfigurationError: Nodes have unequally many, or their ranks are no neighbours.
        """
        if not self.has_met and self.total_ranks > 1:
            nodes: list[int] = [0] * self.total_ranks
            dist.all_gather_object(nodes, self._worker.node)
            told = check_nodes(nodes, self.num_ranks)
            if told and self.is_global_zero:
                log.warning("%s", told)
        super().join()

    # Failures are Ray's to report, and to retry

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        # Ray reports the exception of each worker, and kills the processes: nothing is printed at
        # their end, where the one line that names the cause would be.
        line = self.failures.words_on(exception) if self.failures is not None else ""
        if line:
            exception.add_note(line)


def prepare_trainer(trainer: Any) -> Any:
    """Look whether a Trainer is ready for Ray's workers, as ``ray.train.lightning`` does.

    Args:
        trainer: The Trainer; of Ray's own strategies, too.

    Returns:
        The same.

    Raises:
        ConfigurationError: Its strategy would have each worker train alone.
        RuntimeError: Ray's own, of other strategies than its own and this one.
    """
    strategy = trainer.strategy
    if isinstance(strategy, RayTSPipeStrategy):
        return trainer
    if isinstance(strategy, TSPipeStrategy):
        raise ConfigurationError(
            f"{type(strategy).__name__} would start processes of its own in each of Ray's workers. "
            "Use RayTSPipeStrategy, of lightning_tspipe.integrations.ray, with the same arguments"
        )
    return ray.train.lightning.prepare_trainer(trainer)
