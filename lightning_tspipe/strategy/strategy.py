"""The Lightning strategy: hooks that call the engine, no arithmetic.

One class serves both Lightning worlds (``lightning.pytorch`` and ``pytorch_lightning``): it
derives from the ``ParallelStrategy`` of each, and takes the method order of the one whose Trainer
uses it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.construction import Construction
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.runtime.batches.host_memory import keep_freed_memory
from lightning_tspipe.runtime.batches.loading import LookaheadLoader
from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.evaluation import Evaluation
from lightning_tspipe.runtime.faults.failures import Failures
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.weights.materializing import Source, is_on_meta
from lightning_tspipe.runtime.weights.ownership import Shards
from lightning_tspipe.runtime.weights.policies import POLICIES
from lightning_tspipe.runtime.weights.scaling import shared_scaler
from lightning_tspipe.strategy.checkpoints.progress import leave_ended_epoch
from lightning_tspipe.strategy.checkpoints.writing import ShardWriter
from lightning_tspipe.strategy.lightning.namespaces import strategy_classes, world_of
from lightning_tspipe.strategy.setup.asynchronous import policy_for, refuse_training
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.setup.options import SetupOptions, load_plan
from lightning_tspipe.strategy.setup.plan_of_run import PlanOfRun
from lightning_tspipe.strategy.setup.refusals import (
    TeacherWatch,
    refuse_callbacks,
    refuse_delay,
    refuse_fused,
    refuse_loaders,
    refuse_module,
    refuse_optimizers,
    refuse_trainer,
)
from lightning_tspipe.strategy.shutdown.ends import EndHooks
from lightning_tspipe.strategy.training.batches import CopyStream
from lightning_tspipe.strategy.training.driving import Driver, PipelineDriver
from lightning_tspipe.strategy.training.head_logs import HeadsHere
from lightning_tspipe.strategy.training.manual import ManualOptimization
from lightning_tspipe.strategy.training.pipelined import Pipelined
from lightning_tspipe.strategy.training.repacking import Repacking
from lightning_tspipe.strategy.training.step_results import PeerMetrics, StepSync

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Partition = Literal["auto"] | Sequence[int] | Mapping[str, Sequence[int]]


class PipelineHooks(EndHooks):
    """What the strategy does in Lightning's hooks, in either Lightning world."""

    def __init__(  # noqa: PLR0913 - what a user may choose
        self,
        student: str | Sequence[str] | None = None,
        teacher: str | Sequence[str] | None = None,
        *,
        num_stages: int | None = None,
        num_microbatches: Literal["auto"] | int = "auto",
        schedule: Literal["tspipe", "gpipe", "sequential", "1f1b"] = "tspipe",
        weights: Literal["pipeoptim", "pipedream", "2bw", "spectrain"] | None = None,
        drain_epochs: bool = True,
        costs: Literal["auto", "measured", "flops"] = "auto",
        partition: Partition = "auto",
        split_backward: Literal["auto"] | bool = "auto",
        memory_limit: int | str | None = None,
        state_limit: float | str | None = None,
        plan: Plan | str | Path | None = None,
        activation_checkpointing: Literal["auto"] | bool | Sequence[str] = False,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002 - as in torch and Lightning
        queue_depth: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: Literal["auto"] | bool = "auto",
        verify_checkpoint: bool = True,
        ranks_per_device: int = 1,
        timeout: timedelta = timedelta(minutes=10),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        """Pipeline the student and the teacher of a LightningModule over the devices.

        Args:
            student: Dotted name of the trained submodule, or of several in the order in which
                the step calls them. None: the attribute ``student``, if there is one.
            teacher: The same for the forward-only network. None: the attribute ``teacher``.
            num_stages: Devices per pipeline; ``devices`` must be a multiple of it. With
                ``num_stages=2`` and ``devices=4``, two replicas of a pipeline of two devices share
                each batch. None: all devices are one pipeline. (A device may get more than one
                stage.)
            num_microbatches: Micro-batches per call; ``"auto"`` measures and simulates. Networks
                with BatchNorm normalise each micro-batch by its own statistics.
            schedule: ``tspipe`` (the teacher one update late fills the bubbles), ``gpipe`` or
                ``sequential`` (one device at a time), both without delay; or ``1f1b``: batches
                follow each other through the student, and updates don't wait for them.
            weights: With ``1f1b``, which version of its weights a stage reads: ``pipeoptim`` (the
                default), ``pipedream``, ``2bw`` or ``spectrain``.
            drain_epochs: With ``1f1b``, whether the pipeline is empty where an epoch ends. If not,
                the first batches of the next epoch are read, and begun, before its hooks run.
            costs: What plans are made from: times that are ``measured`` at the first batch, or
                ``flops``, floating-point operations, which are the same in each run. ``"auto"``:
                ``flops`` with ``Trainer(deterministic=True)``, else ``measured``.
            partition: Number of atoms of each stage, in order; a mapping gives ``student`` and
                ``teacher`` apart. ``"auto"``: measured and simulated.
            split_backward: Whether backwards may run in two halves to fill bubbles.
            memory_limit: Bytes that a device may hold, or a text such as ``"16GiB"``; None: no
                limit (on a GPU: what is free).
            state_limit: The same for parameters, gradients, optimizer state and teacher alone; a
                fraction such as ``0.6`` is one of what all ranks hold together.
            plan: A plan, the file that ``tspipe plan --save`` wrote, or a checkpoint of a run that
                went by one: instead of measuring. It decides ``schedule``, ``num_microbatches``,
                ``partition`` and ``split_backward``.
            activation_checkpointing: Whether the student's stages keep their inputs only and run
                again in the backward; a list of patterns (``"backbone.layer[12]*"``) names the
                atoms that do. ``"auto"``: if nothing else fits the memory, or is as fast in it.
            compile: Whether stages are compiled by ``torch.compile``; a mapping gives its
                arguments.
            queue_depth: With heads on a trunk (``StudentFanout``): how many batches the trunk may
                run ahead of the heads; ``"auto"``: as many as it has stages.
            save_distributed_checkpoint: Whether a checkpoint is a folder to which every rank
                writes what it holds. ``"auto"``: for a module that was built on the meta device
                (``configure_model``), of which there is no whole.
            verify_checkpoint: Whether a checkpoint is compared with its checksums when it is
                loaded; each rank compares what it reads.
            ranks_per_device: Processes that share a device; on a GPU their tensors then travel
                through pinned host memory.
            timeout: How long to wait for a rank that says nothing.
            start_method: How the other processes start.
            kwargs: What every Lightning strategy takes (``accelerator``, ``precision_plugin``,
                ``cluster_environment``, ``checkpoint_io``, ``parallel_devices``).
        """
        plan = load_plan(plan)
        if num_stages is None and plan is not None and plan.num_replicas > 1:
            num_stages = plan.pipeline.num_ranks
        super().__init__(num_stages, ranks_per_device, timeout, start_method, **kwargs)
        self.options = SetupOptions(
            student, teacher, num_microbatches, schedule if plan is None else plan.schedule,
            partition, split_backward, memory_limit, state_limit, plan,
            activation_checkpointing, compile, queue_depth, weights, drain_epochs, costs,
            ranks_per_device=ranks_per_device,
        )  # fmt: skip
        self._engine: Engine | None = None
        self._construction = Construction()
        self._source: Source | None = None
        self._restores_optimizers = False
        self._spread: Engine | None = None
        self._kept_of: nn.Module | None = None
        self._save_distributed = save_distributed_checkpoint
        self._verify_checkpoint = verify_checkpoint
        self._evaluations: dict[Any, Evaluation] = {}
        self._resumed: dict[str, Any] | None = None
        self._resumed_replicas: list[dict[str, Any]] | None = None
        self._left: dict[str, Any] | None = None
        self._left_shards: Shards | None = None
        self._writer: ShardWriter | None = None
        self._accumulates = False
        self._loader: LookaheadLoader | None = None
        self._copies: CopyStream | None = None
        self._prepared: dict[int, Any] = {}
        self._has_begun = False
        self._position: tuple[int, int] | None = None
        self._num_loaders = 0
        self._words: dict[int, deque[tuple[int, bool]]] = {}
        self._epoch = -1
        self._epoch_is_through = False
        self._watch: TeacherWatch | None = None
        self._watched_from = 0
        self._gradients_ready = 0.0
        self._reduces = True
        self._is_whole = self._is_forward_only = False
        self._outside: RandomStates | None = None
        self._random: RandomStates | None = None
        self._peer_metrics: PeerMetrics | None = None
        self.step_sync: StepSync | None = None
        self._failures: Failures | None = None
        self._stop = Stop()
        self._ends_together = self._requeues = self._has_told = self._hears_no_more = False
        self._muted: list[Any] = []
        self.have_workers_failed = False
        self._manual = ManualOptimization(self)
        self._driver: Driver = PipelineDriver(self)  # until it is known what is trained
        self.heads_here = HeadsHere(self)
        self.pipelined = Pipelined(self)
        self.repacking = Repacking(self)
        self.plan_of_run = PlanOfRun()

    @property
    def engine(self) -> Engine | None:
        """The engine, once the first batch has been seen."""
        return self._engine

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.forget_other_modules()
        self.accelerator.setup(trainer)
        if self.root_device.type == "cpu":
            keep_freed_memory()
        self.convert_module(self.model)
        if self.num_ranks == 1:
            self.fill_whole()
        world = world_of(self)
        if self.num_replicas == 1:
            # One rank logs for all: there is nothing to reduce.
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*", category=UserWarning)
        # Not for placeholders, and once for each batch.
        vars(self._module)["_on_before_batch_transfer"] = _function(self.before_transfer)
        refuse_trainer(trainer, self.root_device)
        refuse_callbacks(trainer)
        self.refuse_other_io()
        world.insert_metrics_sync(trainer, self)
        if self.num_ranks > 1:
            # Lightning tells them the rank only if the world is larger than one, and there it means
            # replicas: the ranks would write the same file.
            trainer.profiler.setup(trainer.state.fn, self.local_rank, trainer.log_dir)  # type: ignore[attr-defined]
            self._share_what_steps_leave(trainer)
        if trainer.state.fn == "fit":
            self._left = self._left_shards = self._outside = None
            find_networks(self._module, self.options)
            refuse_module(self._module)
            refuse_delay(trainer, self._module)
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
            self._refuse_asynchronous(trainer)
        self.prepare_ends(trainer)
        self.setup_precision_plugin()
        if self.num_ranks > 1:
            self._share_scaler()
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
            self.precision_plugin.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]

    def _refuse_asynchronous(self, trainer: Trainer) -> None:
        policy = policy_for(self.options)
        if policy is not None:
            student = find_networks(self._module, self.options).student
            refuse_training(policy, trainer, self._module, student, self.num_ranks)

    def _share_scaler(self) -> None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            refuse_fused(self.optimizers)
            self.precision_plugin.scaler = shared_scaler(scaler, self.root_device)  # type: ignore[attr-defined]

    def _share_what_steps_leave(self, trainer: Trainer) -> None:
        world = world_of(self)
        # Rank 0 predicts and another rank reads: it tells rank 0 which samples they were.
        warnings.filterwarnings("ignore", message=".*the batch indices.*`.*RemoteLoader`")
        # After a fit ranks hold parts; what is loaded on rank 0 counts, and is shared from there.
        warnings.filterwarnings("ignore", message=".*to a meta parameter in the current model")
        modules = self._modules_outside()
        self._peer_metrics = PeerMetrics(modules, self.replicas)
        self.step_sync = StepSync(self, modules, world.internal_names)
        world.insert_step_sync(trainer, self)

    @override
    def reconnect(self, num_ranks: int) -> None:
        super().reconnect(num_ranks)
        self._loader, self._words = None, {}
        if self._peer_metrics is not None:
            self._peer_metrics.release()
            self._peer_metrics = PeerMetrics(self._modules_outside(), self.replicas)

    def _modules_outside(self) -> dict[str, nn.Module]:
        """The parts of the module that are not pipelined, by their names."""
        module = self._module
        try:
            networks = find_networks(module, self.options)
            names = [*networks.local, *(name for _, name in networks.items())]
        except ConfigurationError:  # an evaluation then goes without a pipeline
            names = []
        inside = {part for name in names for part in module.get_submodule(name).modules()}
        return {path: part for path, part in module.named_modules() if part not in inside}

    @override
    def model_to_device(self) -> None:
        """Parameters move at the first batch, when it is known who gets which."""

    @override
    def on_train_start(self) -> None:
        refuse_loaders(self._trainer)
        # Before every batch it would ask rank 0 of all others whether a SIGTERM came, and no rank
        # could begin a step before rank 0 has ended the last one.
        loop = self._trainer.fit_loop
        loop.epoch_loop._broadcast_sigterm_tensor = _say_nothing  # type: ignore[method-assign] # noqa: SLF001
        leave_ended_epoch(loop)
        self.restore_random()
        self.repacking.run_begins()

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        module = self.lightning_module
        if module is not None:
            vars(module).pop("_on_before_batch_transfer", None)
        self.end_writing(waits=not self.is_failing)
        self.finish_files()
        if module is not None and not self.is_failing:
            # A process that ends takes what it sent with it, unless it has arrived.
            self.barrier("teardown")
        if self._failures is not None:
            self._failures.end_watch()
        if not self.is_failing:
            self.end_without_batches()
        self.heads_here.release()
        self.options = replace(self.options, averages={})
        self._engine = None
        self._resumed = self._resumed_replicas = self._random = None
        self.plan_of_run.forget()
        self._restores_optimizers = False
        self._copies = None
        self._evaluations = {}
        self._is_whole = self._is_forward_only = False
        if self._peer_metrics is not None:
            self._peer_metrics.release()
            self._peer_metrics = None
        self.cluster_environment.teardown()
        if module is not None and not is_on_meta(module):
            module.cpu()
        world_of(self).optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for schedule in ("tspipe", "gpipe", "sequential"):
            name = "tspipe" if schedule == "tspipe" else f"tspipe_{schedule}"
            strategy_registry.register(
                name, cls, description=f"Pipeline parallelism, schedule {schedule}",
                schedule=schedule,
            )  # fmt: skip
        for weights in POLICIES:
            strategy_registry.register(
                f"tspipe_{weights}", cls, description=f"Asynchronous pipeline, weights {weights}",
                schedule="1f1b", weights=weights,
            )  # fmt: skip


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function, which copies of a module share: copies of a method would copy its object."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function


def _say_nothing() -> None:
    """In the place of a word to all ranks."""


# Under their names, so that launchers that pickle a strategy find its class.
globals().update(strategy_classes(PipelineHooks))
TSPipeStrategy: Any = globals()["TSPipeStrategy"]
