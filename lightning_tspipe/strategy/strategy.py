"""The Lightning strategy: hooks that call its components, no arithmetic.

One class serves both Lightning namespaces (``lightning.pytorch`` and ``pytorch_lightning``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.weights.policies import POLICIES
from lightning_tspipe.strategy.checkpoints.files import whole_files
from lightning_tspipe.strategy.components import Components
from lightning_tspipe.strategy.lightning.base import StrategyArguments
from lightning_tspipe.strategy.lightning.processes import StartMethod
from lightning_tspipe.strategy.lightning.ranks import RankedStrategy
from lightning_tspipe.strategy.setup.options import SetupOptions, load_plan

Partition = Literal["auto"] | Sequence[int] | Mapping[str, Sequence[int]]


class TSPipeStrategy(RankedStrategy):
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
        super().__init__(options, num_stages, timeout, **kwargs)
        self._parts = Components(
            self.run, start_method, saves_shards=save_distributed_checkpoint,
            verifies=verify_checkpoint,
        )  # fmt: skip
        self.pipelined = self._parts.pipelined
        self.repacking = self._parts.repacking
        self.shutdown = self._parts.shutdown

    @property
    def engine(self) -> Engine | None:
        """The engine, once the first batch has been seen."""
        return self.run.engine

    @property
    def is_failing(self) -> bool:
        """Whether this rank ends by an exception that the others don't share."""
        return self.run.is_failing

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning splits samplers: over replicas, unless these get parts of batches."""
        module = self.lightning_module
        deals = module is not None and self.repacking.repacks and module.trainer.training
        return self.run.num_replicas > 1 and not deals

    # Processes

    @override
    def _configure_launcher(self) -> None:
        self._launcher = self._parts.processes.make_launcher()

    @override
    def setup_environment(self) -> None:
        self.shutdown.begin()
        super().setup_environment()
        self._parts.processes.set_up_environment()
        self.shutdown.connected()

    # The beginning and the end of a run

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        is_late = empty_init or self._parts.weights.is_configuring
        with self._parts.weights.building() if is_late else super().tensor_init_context(empty_init):
            yield

    @override
    def setup(self, trainer: Any) -> None:
        self._parts.begin(trainer)

    @override
    def model_to_device(self) -> None:
        """Parameters move at the first batch, when it is known who gets which."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.shutdown.on_exception(exception)

    @override
    def teardown(self) -> None:
        self._parts.end()

    # Data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trains = self.run.trainer.training
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
        self._parts.begin_training()

    @override
    def on_train_end(self) -> None:
        self._parts.saving.note_end()
        self._parts.training.end()
        self.shutdown.end_if_asked()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._parts.training.step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return self._parts.training.backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def block_backward_sync(self) -> Any:
        return self._parts.training.accumulating()

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        with self._parts.training.updating():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # Evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._parts.evaluator.step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._parts.evaluator.step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._parts.evaluator.predict(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        self._parts.evaluator.end_validation()
        if self.run.trainer.state.fn != "fit":  # there, more steps follow
            self.shutdown.end_if_asked()

    @override
    def on_test_end(self) -> None:
        self._parts.evaluator.end()
        self.shutdown.end_if_asked()

    @override
    def on_predict_end(self) -> None:
        self._parts.evaluator.end()
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
        return self._parts.saving.module_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._parts.saving.optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        self._parts.saving.save(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._parts.saving.remove(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        return self._parts.reading.load(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._parts.weights.source is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._parts.reading.load_module(self._parts.weights.source, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._parts.weights.source is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self._parts.reading.load_optimizers(self._parts.weights.source)

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
