"""The Lightning strategy: hooks that call the engine, no arithmetic.

One class serves both Lightning worlds (``lightning.pytorch`` and ``pytorch_lightning``): it
derives from the ``ParallelStrategy`` of each, and takes the method order of the one whose Trainer
uses it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.pipelined import Pipelined
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.processes import ProcessHooks
from lightning_tspipe.profiling import is_paired
from lightning_tspipe.runtime.engine import Engine
from lightning_tspipe.runtime.evaluation import Evaluation
from lightning_tspipe.runtime.failures import settle
from lightning_tspipe.runtime.host_memory import keep_freed_memory
from lightning_tspipe.runtime.loading import (
    LookaheadLoader,
    Remote,
    RemoteLoader,
    UnsizedRemoteLoader,
)
from lightning_tspipe.runtime.weights import LOSS_RANK
from lightning_tspipe.setup import SetupOptions, find_networks, load_plan, set_up
from lightning_tspipe.support import (
    TeacherWatch,
    refuse_callbacks,
    refuse_loaders,
    refuse_module,
    refuse_optimizers,
    refuse_precision,
    refuse_result,
)
from lightning_tspipe.worlds import strategy_classes, world_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ParallelStrategy
    from torch.optim import Optimizer

    _Base = ParallelStrategy
else:
    _Base = object

Partition = Literal["auto"] | Sequence[int] | Mapping[str, Sequence[int]]


class PipelineHooks(ProcessHooks):
    """What the strategy does in Lightning's hooks, in either Lightning world."""

    def __init__(  # noqa: PLR0913 - what a user may choose
        self,
        student: str | Sequence[str] | None = None,
        teacher: str | Sequence[str] | None = None,
        *,
        num_microbatches: Literal["auto"] | int = "auto",
        schedule: Literal["tspipe", "gpipe", "sequential"] = "tspipe",
        partition: Partition = "auto",
        split_backward: Literal["auto"] | bool = "auto",
        memory_limit: int | str | None = None,
        state_limit: float | str | None = None,
        plan: Plan | str | Path | None = None,
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
            num_microbatches: Micro-batches per call; ``"auto"`` measures and simulates. Networks
                with BatchNorm normalise each micro-batch by its own statistics.
            schedule: ``tspipe`` (the teacher one update late fills the bubbles), ``gpipe`` or
                ``sequential`` (one device at a time); the latter two without delay.
            partition: Number of atoms of each stage, in order; a mapping gives ``student`` and
                ``teacher`` apart. ``"auto"``: measured and simulated.
            split_backward: Whether backwards may run in two halves to fill bubbles.
            memory_limit: Bytes that a device may hold, or a text such as ``"16GiB"``; None: no
                limit (on a GPU: what is free).
            state_limit: The same for parameters, gradients, optimizer state and teacher alone; a
                fraction such as ``0.6`` is one of what all ranks hold together.
            plan: A plan, or the file that ``tspipe plan --save`` wrote: instead of measuring. It
                decides ``schedule``, ``num_microbatches``, ``partition`` and ``split_backward``.
            ranks_per_device: Processes that share a device; on a GPU their tensors then travel
                through pinned host memory.
            timeout: How long to wait for a rank that says nothing.
            start_method: How the other processes start.
            kwargs: What every Lightning strategy takes (``accelerator``, ``precision_plugin``,
                ``cluster_environment``, ``checkpoint_io``, ``parallel_devices``).
        """
        super().__init__(ranks_per_device, timeout, start_method, **kwargs)
        plan = load_plan(plan)
        self.options = SetupOptions(
            student, teacher, num_microbatches, schedule if plan is None else plan.schedule,
            partition, split_backward, memory_limit, state_limit, plan,
        )  # fmt: skip
        self._engine: Engine | None = None
        self._evaluations: dict[Any, Evaluation] = {}
        self._loader: LookaheadLoader | None = None
        self._prepared: tuple[int, Any] = (-1, None)
        self._announced = -1
        self._watch: TeacherWatch | None = None
        self._watched_from = 0
        self._gradients_ready = 0.0
        self.pipelined = Pipelined(self)

    @property
    def engine(self) -> Engine | None:
        """The engine, once the first batch has been seen."""
        return self._engine

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        if self.root_device.type == "cpu":
            keep_freed_memory()
        self.model = self.precision_plugin.convert_module(self.model)
        world = world_of(self)
        # One rank logs for all: there is nothing to reduce.
        warnings.filterwarnings("ignore", message=".*sync_dist=True.*", category=UserWarning)
        if not self.is_data_rank:
            # There is no batch to transfer on this rank; user hooks would only trip over it.
            self._module.__dict__["_on_before_batch_transfer"] = _pass_on
        if trainer.state.fn == "fit":
            find_networks(self._module, self.options)
            refuse_callbacks(trainer)
            refuse_module(self._module)
            world.insert_metrics_sync(trainer, self)
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if self.num_ranks > 1:
            refuse_precision(self.precision_plugin)
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def model_to_device(self) -> None:
        """Parameters move at the first batch, when it is known who gets which."""

    # Data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.num_ranks == 1:
            return self._look_ahead(dataloader)
        data_rank = self.num_ranks - 1
        length = _length(dataloader) if self.is_data_rank else None
        length = self.transport.broadcast_object(length, data_rank)
        if not self.is_data_rank:
            if length is not None:
                return RemoteLoader(length)
            return UnsizedRemoteLoader(self._hear)
        return self._look_ahead(dataloader, None if length is not None else self._announce)

    def _announce(self, more: bool) -> None:
        for rank in range(self.num_ranks - 1):
            self.transport.send_object(more, rank)

    def _hear(self) -> bool:
        started = time.perf_counter()
        more: bool = self.transport.receive_object(self.num_ranks - 1)
        self.pipelined.recorder.paused("load", started)
        return more

    def _look_ahead(
        self, dataloader: Any, announce: Callable[[bool], None] | None = None
    ) -> LookaheadLoader:
        on_read = partial(self.pipelined.recorder.paused, "load")
        loader = LookaheadLoader(dataloader, announce, on_read)
        if self._trainer.training:
            self._loader = loader
        return loader

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if isinstance(batch, Remote):
            return batch
        if self._trainer.training and self._loader is not None:
            self._loader.take()
            number, prepared = self._prepared
            if number == self._loader.current:
                return prepared
        return super().batch_to_device(batch, device, dataloader_idx)

    def transfer(self, batch: Any) -> Any:
        """A batch of a callback's loader, on this rank's device."""
        return super().batch_to_device(batch)

    def _next_batch(self, batch_idx: int) -> Any:
        """The batch after this one, transferred; None if it is not known or not to be trained."""
        loader, trainer = self._loader, self._trainer
        last = batch_idx + 1 >= trainer.fit_loop.max_batches
        if loader is None or loader.upcoming is None or last or not self._runs_ahead():
            return None
        batch = self.precision_plugin.convert_input(loader.upcoming)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001
        batch = super().batch_to_device(batch)
        self._prepared = (loader.current + 1, batch)
        return batch

    def _runs_ahead(self) -> bool:
        """Whether the teacher of the next batch may run in this step."""
        has_teacher = self._engine is not None and self._engine.pipeline.teacher is not None
        if self.options.schedule != "tspipe" or not has_teacher:
            return False
        trainer = self._trainer
        stepping = not trainer.fit_loop._should_accumulate()  # noqa: SLF001
        step = trainer.global_step + int(stepping)
        for callback in getattr(trainer, "callbacks", ()):
            if hasattr(callback, "delay") and hasattr(callback, "start_step"):
                return bool(callback.delay) and step >= callback.start_step
        return True

    # Training

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        with self.precision_plugin.train_step_context():
            if self._watch is not None and self._trainer.global_step > self._watched_from:
                # After the first update; the hooks of all others do the same.
                self._watch.check()
                self._watch = None
            engine = self._engine or self._begin(batch, rest, batch_idx)
            following = self._next_batch(batch_idx) if self.is_data_rank else None
            ahead = None
            if following is not None:
                ahead = (following, self._step("training_step", rest, batch_idx + 1))
            number = self._loader.current if self._loader is not None else -1
            result = engine.forward(
                self._step("training_step", rest, batch_idx), batch, ahead,
                continues=self._announced == number,
            )  # fmt: skip
            self._announced = number + 1 if ahead is not None else -2
            self.pipelined.batch_size = engine.batch_size
        if self.is_loss_rank:
            refuse_result(result)
            return result
        return torch.zeros((), device=self.root_device, requires_grad=True)

    def _step(self, name: str, rest: Sequence[Any], batch_idx: int) -> Callable[[Any], Any]:
        """A user's step as a function of the batch alone."""
        method = getattr(self._module, name)
        others = [batch_idx if i == 0 else value for i, value in enumerate(rest)]

        def step(batch: Any) -> Any:
            if not self._trainer.predicting:
                # Lightning finds the batch size for averages here.
                self._trainer._logger_connector.on_batch_start(batch)  # noqa: SLF001
            return method(batch, *others)

        return step

    def _begin(self, batch: Any, rest: Sequence[Any], batch_idx: int) -> Engine:
        """Trace the first step, plan, and give every rank its stages."""
        first = _on_cpu(batch) if self.is_data_rank else None
        first = _to(self.transport.broadcast_object(first, self.num_ranks - 1), self.root_device)
        self._engine = set_up(
            self._module,
            self.options,
            self.transport,
            self.root_device,
            self.precision_plugin.forward_context,
            self._step("training_step", rest, batch_idx),
            first,
            [_plain(optimizer) for optimizer in self.optimizers],
        )
        world_of(self).optimizers_to_device(self.optimizers, self.root_device)
        self._evaluations = {}
        self._watch = self._watch_teacher()
        self._watched_from = self._trainer.global_step
        self.pipelined.placed(self._engine)
        return self._engine

    def _watch_teacher(self) -> TeacherWatch | None:
        engine = self._engine
        assert engine is not None
        networks = engine.captured.networks
        teacher = networks.get("teacher")
        if self.num_ranks == 1 or teacher is None or is_paired(networks["student"], teacher):
            return None
        blocks = [self._module.get_submodule(name) for name in teacher.block_names]
        return TeacherWatch(p for block in blocks for p in block.parameters())

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        engine = self._engine
        assert engine is not None
        plugin, module = self.precision_plugin, self._module
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        run = None
        if self.is_loss_rank:
            run = partial(plugin.backward, closure_loss, module, optimizer, *args, **kwargs)
        with plugin.forward_context():
            engine.backward(run)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        self._gradients_ready = time.perf_counter()
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._engine is not None:
            self._engine.note_optimizer(self._gradients_ready)
        self.pipelined.step_done()
        return result

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all stages."""
        started = time.perf_counter()
        parameters = [
            p for g in _plain(optimizer).param_groups for p in g["params"] if p.grad is not None
        ]
        own = nn.utils.get_total_norm([p.grad for p in parameters]) if parameters else None
        squares = self.transport.gather_object(0.0 if own is None else float(own) ** 2)
        total = self.transport.broadcast_object(
            None if squares is None else sum(squares) ** 0.5, LOSS_RANK
        )
        nn.utils.clip_grads_with_norm_(
            parameters, clip_val, torch.tensor(total, device=self.root_device)
        )
        self.pipelined.recorder.paused("clip", started)
        self._gradients_ready = time.perf_counter()

    # Evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluation_step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluation_step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluation_step("predict_step", *args, **kwargs)

    def _evaluation_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        step = self._step(name, rest, rest[0] if rest else 0)
        dataloader_idx = rest[1] if len(rest) > 1 else 0
        return self.evaluate_batch(step, batch, key=(name, dataloader_idx))

    def evaluate_batch(self, step: Callable[[Any], Any], batch: Any, key: Any) -> Any:
        """Run a forward-only step on one batch; its result on the loss rank, None elsewhere."""
        if self._engine is None:
            return self._evaluate_whole(step, batch)
        if key not in self._evaluations:
            first = _on_cpu(batch) if self.is_data_rank else None
            first = self.transport.broadcast_object(first, self.num_ranks - 1)
            self._evaluations[key] = Evaluation(self._engine, step, _to(first, self.root_device))
        return self._evaluations[key].run(step, batch)

    def forget_evaluation(self, key: Any) -> None:
        """A forward-only step will not be run again."""
        self._evaluations.pop(key, None)

    def _evaluate_whole(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Before the networks are cut, and after training, the loss rank holds all of them."""
        data_rank = self.num_ranks - 1
        if self.is_data_rank and not self.is_loss_rank:
            self.transport.send_object(_on_cpu(batch), LOSS_RANK)
            self.transport.finish_step()
        if not self.is_loss_rank:
            return None
        if not self.is_data_rank:
            batch = self.transport.receive_object(data_rank)
        device = next((p.device for p in self._module.parameters()), self.root_device)
        return step(_to(batch, device))

    # Ends

    @override
    def on_train_start(self) -> None:
        refuse_loaders(self._trainer)

    @override
    def on_train_end(self) -> None:
        if self._engine is not None:
            self._engine.drain()
            self._engine.shards.restore(self.global_rank, self.transport)
            self._engine = None
            self._evaluations = {}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None:
            return self._module.state_dict()
        return self._engine.shards.state_dict(self.global_rank, self.transport)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._engine is None:
            return super().optimizer_state(optimizer)
        return self._engine.shards.optimizer_state(_plain(optimizer), self.transport)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.num_ranks > 1 and not isinstance(exception, KeyboardInterrupt):
            settle(exception, self.global_rank, getattr(self._launcher, "procs", ()))

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        module = self.lightning_module
        if module is not None and not module.trainer.interrupted:
            # A process that ends takes what it sent with it, unless it has arrived.
            self.barrier("teardown")
        self._engine = None
        self._evaluations = {}
        self.cluster_environment.teardown()
        if module is not None and not any(p.is_meta for p in module.parameters()):
            module.cpu()
        world_of(self).optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for schedule in ("tspipe", "gpipe", "sequential"):
            name = "tspipe" if schedule == "tspipe" else f"tspipe_{schedule}"
            strategy_registry.register(
                name, cls, description=f"Pipeline parallelism, schedule {schedule}",
                schedule=schedule,
            )  # fmt: skip


def _plain(optimizer: Any) -> Optimizer:
    plain: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return plain


def _pass_on(batch: Any, dataloader_idx: int = 0) -> Any:  # noqa: ARG001 - Lightning's signature
    return batch


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _to(batch: Any, device: torch.device) -> Any:
    from torch.utils import _pytree as pytree  # noqa: PLC0415

    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)


def _on_cpu(batch: Any) -> Any:
    return _to(batch, torch.device("cpu"))


# Under their names, so that launchers that pickle a strategy find its class.
globals().update(strategy_classes(PipelineHooks))
TSPipeStrategy: Any = globals()["TSPipeStrategy"]
