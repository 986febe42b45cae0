"""The Lightning strategy: hooks that call its components, no arithmetic.

One class serves both Lightning namespaces (``lightning.pytorch`` and ``pytorch_lightning``)::

    TSPipeStrategy ──► run          Lightning's objects, the ranks, the engine
                       processes    launchers, groups, transport
                       data         loaders, batches ahead, transfer
                       weights      of a module that is built without values
                       results      what steps leave behind, metrics
                       evaluator    validation, test, prediction
                       saving, reading    checkpoints: files and shards
                       shutdown     failures and signals
                       pipelined    what callbacks may ask
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.distributed import GroupMember
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.runtime.batches.host_memory import keep_freed_memory
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.faults.phases import HERE
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import gather_among, reduce_among
from lightning_tspipe.runtime.weights.materializing import is_on_meta
from lightning_tspipe.runtime.weights.policies import POLICIES
from lightning_tspipe.runtime.weights.scaling import shared_scaler
from lightning_tspipe.strategy.checkpoints.files import whole_files
from lightning_tspipe.strategy.checkpoints.loading import CheckpointReader
from lightning_tspipe.strategy.checkpoints.saving import CheckpointWriter
from lightning_tspipe.strategy.lightning.base import StrategyArguments
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces, namespace_of
from lightning_tspipe.strategy.lightning.processes import Processes, StartMethod
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.asynchronous import policy_for, refuse_training
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.setup.options import SetupOptions, load_plan
from lightning_tspipe.strategy.setup.refusals import (
    refuse_callbacks,
    refuse_delay,
    refuse_fused,
    refuse_loaders,
    refuse_module,
    refuse_optimizers,
    refuse_trainer,
)
from lightning_tspipe.strategy.shutdown.shutdown import Shutdown
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.evaluating import Evaluator
from lightning_tspipe.strategy.training.head_logs import HeadsHere
from lightning_tspipe.strategy.training.manual import ManualOptimization
from lightning_tspipe.strategy.training.module_weights import ModuleWeights
from lightning_tspipe.strategy.training.pipelined import Pipelined
from lightning_tspipe.strategy.training.progress import Resumption, leave_ended_epoch
from lightning_tspipe.strategy.training.relaying import Relaying
from lightning_tspipe.strategy.training.repacking import Repacking
from lightning_tspipe.strategy.training.step_results import StepResults
from lightning_tspipe.strategy.training.steps import TrainingHooks

Partition = Literal["auto"] | Sequence[int] | Mapping[str, Sequence[int]]


class TSPipeStrategy(TrainingHooks):
    """Pipelines the student and the teacher of a LightningModule over the devices."""

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
        start_method: StartMethod = "popen",
        **kwargs: Unpack[StrategyArguments],
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
        options = SetupOptions(
            student, teacher, num_microbatches, schedule if plan is None else plan.schedule,
            partition, split_backward, memory_limit, state_limit, plan,
            activation_checkpointing, compile, queue_depth, weights, drain_epochs, costs,
            ranks_per_device=ranks_per_device,
        )  # fmt: skip
        self.namespace = installed_namespaces()[0]
        run = Run(self, options, num_stages, timeout)
        super().__init__(run, **kwargs)
        self._resumption = Resumption()
        self._weights = ModuleWeights(run)
        self.heads_here = HeadsHere(run)
        self._results = StepResults(run, self.heads_here)
        self.data = Data(run, self._resumption, self._results)
        self.evaluator = Evaluator(run, self.data, self._weights, self._results, self.heads_here)
        self._manual = ManualOptimization(run)
        self._relaying = Relaying(run, self._weights)
        self.repacking = Repacking(run, self.data, self.leave_engine, self._reconnect)
        self.pipelined = Pipelined(run, self.data, self.evaluator, self.heads_here, self.repacking)
        self._saving = CheckpointWriter(
            run, self.data, self._weights, self._resumption, self.evaluator, self._manual,
            self.repacking, self.heads_here, save_distributed_checkpoint,
        )  # fmt: skip
        self._reading = CheckpointReader(
            run, self._weights, self._resumption, verifies=verify_checkpoint
        )
        self.shutdown = Shutdown(
            run, self._saving, self.evaluator, starts_scripts=start_method == "popen"
        )
        self._processes = Processes(run, start_method, self.shutdown.watch)

    @property
    def engine(self) -> Engine | None:
        """The engine, once the first batch has been seen."""
        return self.run.engine

    @property
    def options(self) -> SetupOptions:
        """What the user chose."""
        return self.run.options

    @property
    def transport(self) -> Transport:
        """How this rank reaches the others of its pipeline."""
        return self.run.transport

    @property
    def is_failing(self) -> bool:
        """Whether this rank ends by an exception that the others don't share."""
        return self.run.is_failing

    # Places

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
    def is_distributed(self) -> bool:
        """Whether Lightning splits samplers: over replicas, unless these get parts of batches."""
        module = self.lightning_module
        deals = module is not None and self.repacking.repacks and module.trainer.training
        return self.run.num_replicas > 1 and not deals

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.run.num_replicas, "rank": self.run.replica}

    # Processes

    @override
    def _configure_launcher(self) -> None:
        self._launcher = self._processes.make_launcher()

    def set_world_ranks(self) -> None:
        """Let this process know which rank it is; Lightning calls it before anything can fail."""
        self.run.set_world_ranks()

    @override
    def setup_environment(self) -> None:
        self.shutdown.begin()
        super().setup_environment()
        self._processes.set_up_environment()
        self.shutdown.connected()

    def _reconnect(self, num_ranks: int) -> None:
        """Divide the ranks into other pipelines; every rank calls it, and nothing is under way."""
        HERE.interrupt("moving to another mesh")
        self._processes.reconnect(num_ranks)
        if self._resumption.replicas is not None and self.run.engine is None:
            self._resumption.go_on(
                self._resumption.replicas, self.run.replica, self.run.num_replicas,
                shares_batches=True,
            )  # fmt: skip
        self.shutdown.reconnected()
        HERE.go_on()
        self.data.reconnected()
        self._results.reconnected()

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

    # The beginning and the end of a run

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        is_late = empty_init or self._weights.is_configuring
        with self._weights.building() if is_late else super().tensor_init_context(empty_init):
            yield

    @override
    def setup(self, trainer: Any) -> None:
        run, module = self.run, self.run.module
        assert self.accelerator is not None
        self._weights.forget_other_modules()
        self.accelerator.setup(trainer)
        if self.root_device.type == "cpu":
            keep_freed_memory()
        self.model = self._weights.convert(module)
        if run.num_ranks == 1:
            self._weights.fill_whole()
        if run.num_replicas == 1:
            # One rank logs for all: there is nothing to reduce.
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*", category=UserWarning)
        # Not for placeholders, and once for each batch.
        vars(module)["_on_before_batch_transfer"] = _function(self.data.before_transfer)
        refuse_trainer(trainer, self.root_device)
        refuse_callbacks(trainer)
        self._saving.begin(fits=trainer.state.fn == "fit")
        if run.num_ranks > 1:
            # Lightning tells them the rank only if the world is larger than one, and there it means
            # replicas: the ranks would write the same file.
            trainer.profiler.setup(trainer.state.fn, self.local_rank, trainer.log_dir)
        self._results.set_up(trainer)
        if trainer.state.fn == "fit":
            self._set_up_fit(trainer)
        self.shutdown.prepare(trainer)
        self.setup_precision_plugin()
        if run.num_ranks > 1:
            self._share_scaler()
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
            self.precision_plugin.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]

    def _set_up_fit(self, trainer: Any) -> None:
        run, module = self.run, self.run.module
        self.evaluator.begin_fit()
        student = find_networks(module, run.options).student
        refuse_module(module)
        refuse_delay(trainer, module)
        self.setup_optimizers(trainer)
        refuse_optimizers(self.optimizers)
        policy = policy_for(run.options)
        if policy is not None:
            refuse_training(policy, trainer, module, student, run.num_ranks)

    def _share_scaler(self) -> None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            refuse_fused(self.optimizers)
            self.precision_plugin.scaler = shared_scaler(scaler, self.root_device)  # type: ignore[attr-defined]

    @override
    def model_to_device(self) -> None:
        """Parameters move at the first batch, when it is known who gets which."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.shutdown.on_exception(exception)

    @override
    def teardown(self) -> None:
        run, module = self.run, self.lightning_module
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if module is not None:
            vars(module).pop("_on_before_batch_transfer", None)
        self.shutdown.end_of_run()
        if not run.is_failing:
            self._saving.end_without_batches()
        self.heads_here.release()
        run.options = replace(run.options, averages={})
        run.engine = None
        self._resumption.forget()
        run.plan.forget()
        self._weights.restores_optimizers = False
        self.data.release()
        self.evaluator.release()
        self._results.release()
        self.cluster_environment.teardown()
        if module is not None and not is_on_meta(module):
            module.cpu()
        self.namespace.optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # Data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trains = self.run.trainer.training
        shared = self.repacking.share(dataloader) if trains else dataloader
        return self.data.loader_of_rank(shared)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        return self.data.batch_to_device(batch, device, dataloader_idx)

    # Training; its steps are above

    @override
    def on_train_start(self) -> None:
        refuse_loaders(self.run.trainer)
        # Before every batch it would ask rank 0 of all others whether a SIGTERM came, and no rank
        # could begin a step before rank 0 has ended the last one.
        loop = self.run.trainer.fit_loop
        loop.epoch_loop._broadcast_sigterm_tensor = _say_nothing  # type: ignore[method-assign] # noqa: SLF001
        leave_ended_epoch(loop)
        self.data.restore_random()
        self.repacking.run_begins()

    @override
    def on_train_end(self) -> None:
        self._saving.note_end()
        super().on_train_end()
        self.shutdown.end_if_asked()

    # Evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluator.step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluator.step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluator.predict(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        self.evaluator.end_validation()
        if self.run.trainer.state.fn != "fit":  # there, more steps follow
            self.shutdown.end_if_asked()

    @override
    def on_test_end(self) -> None:
        self.evaluator.end()
        self.shutdown.end_if_asked()

    @override
    def on_predict_end(self) -> None:
        self.evaluator.end()
        self.shutdown.end_if_asked()

    # Checkpoints

    @property  # type: ignore[explicit-override] # of the setter; it is below
    @override
    def checkpoint_io(self) -> Any:
        """How files are written: whole or not at all, unless the user brings a way."""
        found: Any = self._checkpoint_io
        if found is None:
            found = self._checkpoint_io = whole_files(self.namespace)
        elif not getattr(found, "_base_checkpoint_io_configured", True):
            found.checkpoint_io = whole_files(self.namespace)
        return found

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._saving.module_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._saving.optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        self._saving.save(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._saving.remove(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        return self._reading.load(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._weights.source is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._reading.load_module(self._weights.source, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._weights.source is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self._reading.load_optimizers(self._weights.source)

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
