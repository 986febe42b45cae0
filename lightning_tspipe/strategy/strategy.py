"""The Lightning strategy: hooks that call its components, no arithmetic.

One class serves both Lightning namespaces (``lightning.pytorch`` and ``pytorch_lightning``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.runtime.batches.host_memory import keep_freed_memory
from lightning_tspipe.runtime.faults.phases import HERE
from lightning_tspipe.runtime.transport.replicas import shared_scaler
from lightning_tspipe.runtime.weights.materializing import is_on_meta
from lightning_tspipe.schedules.registry import ASYNCHRONOUS
from lightning_tspipe.strategy.checkpoints.files import WholeFiles
from lightning_tspipe.strategy.checkpoints.loading import CheckpointReader
from lightning_tspipe.strategy.checkpoints.saving import CheckpointWriter
from lightning_tspipe.strategy.lightning.namespaces import StrategyArguments
from lightning_tspipe.strategy.lightning.registration import register
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup import refusals
from lightning_tspipe.strategy.setup.declared import are_named, find_networks, relay_of
from lightning_tspipe.strategy.setup.options import SetupOptions, StartMethod, load_plan
from lightning_tspipe.strategy.shutdown.shutdown import Shutdown
from lightning_tspipe.strategy.training.optimizers import plain_optimizer
from lightning_tspipe.strategy.training.relaying import RelayTraining
from lightning_tspipe.strategy.training.steps import Parts, Training, leave_ended_epoch

Partition = Literal["auto"] | Sequence[int] | Mapping[str, Sequence[int]]


class TSPipeStrategy(Run):
    """Pipelines the student and the teacher of a LightningModule over the devices."""

    def __init__(  # noqa: PLR0913 - what a user may choose
        self,
        student: str | Sequence[str] | None = None,
        teacher: str | Sequence[str] | None = None,
        *,
        num_stages: int | None = None,
        num_microbatches: Literal["auto"] | int = "auto",
        schedule: Literal["tspipe", "gpipe", "sequential", "1f1b", "interleaved", "zbv"] = "tspipe",
        weights: Literal["pipeoptim", "pipedream", "2bw", "spectrain", "synchronous"] | None = None,
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
        zero_stage: Literal[0, 1] = 0,
        ranks_per_device: int = 1,
        timeout: timedelta = timedelta(minutes=10),
        start_method: StartMethod = "popen",
        **kwargs: Unpack[StrategyArguments],
    ) -> None:
        """Pipeline the student and the teacher of a LightningModule over the devices.

        Args:
            student: Dotted name of the trained submodule, or of several in the order in which
                the step calls them. None: the attribute ``student``; if there is none, the networks
                are found by the first step.
            teacher: The same for forward-only networks. None: the attribute ``teacher``, or as
                found.
            num_stages: Devices per pipeline; ``devices`` must be a multiple of it. With
                ``num_stages=2`` and ``devices=4``, two replicas of a pipeline of two devices share
                each batch. None: all devices are one pipeline. (A device may get more than one
                stage.)
            num_microbatches: Micro-batches per call; ``"auto"`` measures and simulates. Networks
                with BatchNorm normalise each micro-batch by its own statistics.
            schedule: ``tspipe`` (the teacher one update late fills the bubbles), ``gpipe`` or
                ``sequential`` (one device at a time), both without delay; or ``1f1b``: batches
                follow each other through the student, and updates don't wait for them.
                ``interleaved`` and ``zbv`` have several stages on each device, and the batches of a
                window of ``accumulate_grad_batches`` in the pipeline.
            weights: With ``1f1b``, which version of its weights a stage reads: ``pipeoptim`` (the
                default), ``pipedream``, ``2bw`` or ``spectrain``; ``synchronous``: batches follow
                each other within a window of ``accumulate_grad_batches`` and read the newest.
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
            zero_stage: 1: with several replicas of a pipeline, what an optimizer keeps for a
                parameter is held by one of them, which updates it for all (ZeRO, stage 1); 0: by
                all of them.
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
        if weights is None and plan is not None and plan.window and plan.schedule == ASYNCHRONOUS:
            weights = "synchronous"
        options = SetupOptions(
            student, teacher, num_microbatches, schedule if plan is None else plan.schedule,
            partition, split_backward, memory_limit, state_limit, plan,
            activation_checkpointing, compile, queue_depth, weights, drain_epochs, costs,
            zero_stage=zero_stage, ranks_per_device=ranks_per_device, start_method=start_method,
        )  # fmt: skip
        super().__init__(options, num_stages, timeout, **kwargs)
        self._parts = parts = Parts(self)
        self.pipelined, self.repacking = parts.pipelined, parts.repacking
        self._training = Training(parts)  # until it is known what is trained
        self._saving = CheckpointWriter(parts, distributed=save_distributed_checkpoint)
        self._reading = CheckpointReader(parts, verifies=verify_checkpoint)
        self.shutdown = Shutdown(self, self._saving, parts.evaluator)

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning splits samplers: over replicas, unless these get parts of batches."""
        module = self.lightning_module
        deals = module is not None and self.freezing.is_shared and module.trainer.training
        return self.num_replicas > 1 and not deals

    # Processes

    @override
    def setup_environment(self) -> None:
        self.shutdown.begin()
        super().setup_environment()
        self.join()
        self.shutdown.connected()
        if self.lightning_module is None:  # only links are measured, by `tspipe plan`
            return
        self._parts.averages.begin()
        self._parts.weights.complete()

    # The beginning and the end of a run

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        is_late = empty_init or self._parts.weights.is_configuring
        with self._parts.weights.building() if is_late else super().tensor_init_context(empty_init):
            yield

    @override
    def setup(self, trainer: Any) -> None:
        """Set up a run: refuse what a pipeline can't follow, and insert callbacks."""
        module, parts = self.module, self._parts
        self.found = None
        parts.weights.forget_other_modules()
        parts.sharding.forget()
        self.accelerator.setup(trainer)
        if self.root_device.type == "cpu":
            keep_freed_memory()
        self.model = parts.weights.convert(module)
        self.model_to_device()
        if self.num_replicas == 1:
            # One rank logs for all: there is nothing to reduce.
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*", category=UserWarning)

        # A function, which copies of the module share: copies of a method would copy its object.
        def before_transfer(*args: Any, **kwargs: Any) -> Any:
            return parts.data.before_transfer(*args, **kwargs)

        # Not for placeholders, and once for each batch.
        vars(module)["_on_before_batch_transfer"] = before_transfer
        refusals.refuse_trainer(trainer, self.root_device)
        parts.averages.set_up()
        relay = relay_of(trainer)
        self._training = Training(parts) if relay is None else RelayTraining(parts, relay)
        self._saving.begin(fits=trainer.state.fn == "fit")
        if self.num_ranks > 1:
            # Lightning tells them the rank only if the world is larger than one, and there it means
            # replicas: the ranks would write the same file.
            trainer.profiler.setup(trainer.state.fn, self.local_rank, trainer.log_dir)
        parts.results.set_up(trainer)
        if trainer.state.fn == "fit":
            self._set_up_fit(trainer)
        self.shutdown.prepare(trainer)
        self.setup_precision_plugin()
        if self.num_ranks > 1:
            self._share_gradients(self.precision_plugin)

    def _set_up_fit(self, trainer: Any) -> None:
        module = self.module
        named = are_named(module, self.options)
        student = find_networks(module, self.options).student if named else ()
        self.setup_optimizers(trainer)
        refusals.refuse_module(trainer, module, self.optimizers)
        if self.options.zero_stage:
            refusals.refuse_divided(self.optimizers)
        policy = self.options.policy
        if policy is not None:
            refusals.refuse_training(policy, trainer, module, student, self.num_ranks)

    def _share_gradients(self, plugin: Any) -> None:
        """Scale and clip by the gradients of all ranks."""
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            refusals.refuse_fused(self.optimizers)
            plugin.scaler = shared_scaler(scaler, self.root_device)
        plugin.clip_grad_by_norm = self._training.clip_by_norm
        plugin.clip_grad_by_value = self._training.clip_by_value

    @override
    def model_to_device(self) -> None:
        """Move the module, alone; else its tensors move when it is known who gets which.

        Either way ``module.device`` is where its steps compute.
        """
        module, alone = self.module, self.num_ranks == 1 and not is_on_meta(self.module)
        stays = () if alone else ((module, "_apply", lambda *_args, **_kwargs: module),)
        with attributes_replaced(stays):
            module.to(self.root_device)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.shutdown.on_exception(exception)

    @override
    def teardown(self) -> None:
        """Tear down a run, however it ended."""
        parts, module = self._parts, self.lightning_module
        assert self.cluster_environment is not None
        if module is not None:
            vars(module).pop("_on_before_batch_transfer", None)
        self.shutdown.end_of_run()
        if not self.is_failing:
            self._saving.end_without_batches()
        self.features = None
        self.options = replace(self.options, averages={})
        self.engine = None
        self.resumption.forget()
        parts.weights.restores_optimizers = False
        parts.weights.let_go()
        parts.averages.end()
        parts.evaluator.release()
        parts.results.release()
        self._training.unwatch()
        self.cluster_environment.teardown()
        if module is not None and not is_on_meta(module):
            module.cpu()
        self.namespace.optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @override
    def reconnect(self, num_ranks: int) -> None:
        HERE.interrupt("moving to another mesh")
        super().reconnect(num_ranks)
        resumption = self.resumption
        if resumption.replicas is not None and self.engine is None:
            resumption.go_on(
                resumption.replicas, self.replica, self.num_replicas, shares_batches=True
            )
        self.shutdown.reconnected()
        HERE.go_on()
        self._parts.data.reconnected()
        self._parts.results.reconnected()

    # Data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trains = self.trainer.training
        shared = self.repacking.share(dataloader) if trains else dataloader
        return self._parts.data.loader_of_rank(shared)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        return self._parts.data.batch_to_device(batch, device, dataloader_idx)

    # Training

    @override
    def on_train_start(self) -> None:
        refusals.refuse_loaders(self.trainer)
        # Before every batch it would ask rank 0 of all others whether a SIGTERM came, and no rank
        # could begin a step before rank 0 has ended the last one.
        loop = self.trainer.fit_loop
        loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign] # noqa: SLF001
        leave_ended_epoch(loop)
        self._parts.data.restore_random()
        self._parts.repacking.run_begins()

    @override
    def on_train_end(self) -> None:
        self._saving.note_end()
        self._training.unwatch()
        self._training.end()
        self.shutdown.end_if_asked()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._training.step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return self._training.backward(closure_loss, optimizer, *args, **kwargs)

    @override
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While inside, gradients are only added up: there are more batches before the update."""
        with attributes_replaced([(self, "reduces", False)]):
            yield

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        divided = self._parts.sharding.stepping(plain_optimizer(optimizer))
        with self._training.updating(), divided:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def grad_norm(self) -> Tensor:
        """The 2-norm of the gradients of all parameters, over all ranks, as a tensor of one number.

        Each rank has the gradients of its own parameters, so that a hook can't compute it. Every
        rank has to call it, such as in ``on_before_optimizer_step``, and gets the same.
        """
        return self._training.norm_of(self.module.parameters())

    # Evaluation

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._training.unwatch()
        return self._parts.evaluator.step(name, *args, **kwargs)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    @override
    def on_validation_end(self) -> None:
        self._parts.evaluator.end()
        if self.trainer.state.fn != "fit":  # there, more steps follow
            self.shutdown.end_if_asked()

    on_test_end = on_predict_end = on_validation_end

    # Checkpoints

    @property  # type: ignore[explicit-override] # of the setter; it is below
    @override
    def checkpoint_io(self) -> Any:
        """How files are written: whole or not at all, unless the user brings a way."""
        found: Any = self._checkpoint_io
        if found is None:
            found = self._checkpoint_io = WholeFiles()
        elif not getattr(found, "_base_checkpoint_io_configured", True):
            found.checkpoint_io = WholeFiles()
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
        self._parts.weights.complete()
        return self._reading.load(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._parts.weights.source is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._reading.load_module(self._parts.weights.source, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._parts.weights.source is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self._reading.load_optimizers(self._parts.weights.source)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register(strategy_registry, cls)
