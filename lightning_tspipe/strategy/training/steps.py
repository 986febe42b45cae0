"""The training step in Lightning's hooks: forward, backward, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.profiling import is_paired
from lightning_tspipe.runtime.batches.host_memory import give_back_memory
from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.evaluation import Evaluation
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.transport.sums import sum_over_ranks
from lightning_tspipe.strategy.checkpoints.progress import late_teacher, restore
from lightning_tspipe.strategy.lightning.namespaces import world_of
from lightning_tspipe.strategy.setup.asynchronous import check_epochs
from lightning_tspipe.strategy.setup.plan_of_run import PlanOfRun
from lightning_tspipe.strategy.setup.refusals import (
    TeacherWatch,
    refuse_hyperparameters,
    refuse_stop,
)
from lightning_tspipe.strategy.setup.weight_source import Origin
from lightning_tspipe.strategy.training.data import DataHooks
from lightning_tspipe.strategy.training.driving import Driver
from lightning_tspipe.strategy.training.head_logs import HeadsHere
from lightning_tspipe.strategy.training.manual import ManualOptimization
from lightning_tspipe.strategy.training.optimizers import (
    hyperparameters,
    parameters_of,
)
from lightning_tspipe.strategy.training.relaying import driver_of
from lightning_tspipe.strategy.training.repacking import Repacking

if TYPE_CHECKING:
    from torch.optim import Optimizer


class TrainingHooks(DataHooks):
    """The part of the strategy that trains."""

    _evaluations: dict[Any, Evaluation]
    _epoch: int
    _epoch_is_through: bool
    _watch: TeacherWatch | None
    _watched_from: int
    _gradients_ready: float
    _reduces: bool
    _stop: Stop
    _manual: ManualOptimization
    _driver: Driver
    heads_here: HeadsHere
    repacking: Repacking
    plan_of_run: PlanOfRun
    _resumed_replicas: list[dict[str, Any]] | None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        self._has_begun = True
        with self._watched(), self.precision_plugin.train_step_context():
            if self._watch is not None and self._trainer.global_step > self._watched_from:
                # After the first update; the hooks of all others do the same.
                self._watch.check()
                self._watch = None
            if self._engine is None:
                self._begin(batch, self._training_step(rest, batch_idx), batch_idx)
            assert self._engine is not None
            self._position = self._position or self._engine.position
            return self._driver.training_step(batch, rest, batch_idx)

    def place_of(self, batch_idx: int) -> int:
        """Of a batch that follows, its place in its epoch, which may be the next one."""
        length = self._trainer.fit_loop.max_batches
        return batch_idx if batch_idx < length else int(batch_idx - length)

    def drain_at_an_end(self, engine: Engine) -> None:
        """Behind the end of an epoch, early or not, nothing is left of what ran ahead."""
        if self._trainer.current_epoch != self._epoch:
            if self.options.drain_epochs or not self._epoch_is_through:
                engine.drain()
            self._epoch = self._trainer.current_epoch
        loop = self._trainer.fit_loop
        self._epoch_is_through = loop.epoch_loop.batch_idx + 1 == loop.max_batches

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around a step: what it changes on its own rank only is refused."""
        if self.num_ranks == 1:
            yield
            return
        was_stopped = self._trainer.should_stop
        before = self._hyperparameters()
        yield
        refuse_stop(self._trainer, before=was_stopped)
        refuse_hyperparameters(before, self._hyperparameters())

    def _hyperparameters(self) -> list[Any]:
        """What the groups hold beside their parameters; by hand, their changes are told to all."""
        if not self._module.automatic_optimization:
            return []
        return [hyperparameters(optimizer) for optimizer in self.optimizers]

    def _origin(self) -> Origin:
        """Where the values of the module come from."""
        return Origin()

    def _training_step(self, rest: Sequence[Any], batch_idx: int) -> Step:
        """The user's step, as the trace and the prologue run it."""
        step = self._step("training_step", rest, batch_idx)
        return step if self._module.automatic_optimization else self._manual.silent(step)

    def _begin(self, batch: Any, step: Step, batch_idx: int) -> Engine:
        """Trace the first step, plan, and give every rank its stages."""
        random = RandomStates.now()
        first = self.share(batch)
        self._driver = driver_of(self)
        self._engine = self._driver.set_up(first, step)
        if not self.options.drain_epochs:
            check_epochs(self._trainer, self.num_ranks)
        world_of(self).optimizers_to_device(self.optimizers, self.root_device)
        random.restore()  # measuring must not change what the networks draw
        if self.root_device.type == "cpu":
            give_back_memory(self.root_device)
        self._go_on(self._engine, step, batch, batch_idx)
        self._evaluations = {}
        self._watch = self._watch_teacher()
        self._watched_from = self._trainer.global_step
        self._driver.begin()
        self.pipelined.placed(self._engine)
        self.heads_here.placed(self._engine)
        self.repacking.begun()
        return self._engine

    def _go_on(self, engine: Engine, step: Step, batch: Any, batch_idx: int) -> None:
        """If the run is resumed, go on exactly where it was stopped."""
        progress, self._resumed = self._resumed, None
        self._resumed_replicas = None
        runs_ahead = self.options.schedule == "tspipe" and "teacher" in engine.captured.networks
        if progress is not None:
            place = self._trainer.current_epoch, batch_idx
            restore(engine, progress, place, runs_ahead=runs_ahead)
        declared = self._declared_delay
        # The late teacher of a checkpoint that another strategy made within an epoch.
        weights = declared.take_restored() if declared is not None else {}
        if weights and runs_ahead and batch_idx > 0 and engine.ahead() is None:
            with late_teacher(self._module, weights):
                engine.run_ahead(step, batch)
        self._epoch = self._trainer.current_epoch

    def _watch_teacher(self) -> TeacherWatch | None:
        engine = self._engine
        assert engine is not None
        networks = engine.captured.networks
        student, teacher = networks.get("student"), networks.get("teacher")
        if self.num_ranks == 1 or student is None or teacher is None or is_paired(student, teacher):
            return None
        blocks = [self._module.get_submodule(name) for name in teacher.block_names]
        return TeacherWatch(p for block in blocks for p in block.parameters())

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return self._driver.backward(closure_loss, optimizer, *args, **kwargs)

    @property
    def reduces(self) -> bool:
        """Whether an update follows the backward that is about to run."""
        return self._reduces

    def note_gradients(self) -> None:
        """The gradients of this step are there: what follows is the optimizer's time."""
        self._gradients_ready = time.perf_counter()

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While inside, gradients are only added up: there are more batches before the update."""
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        started = time.perf_counter()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        automatic = self._module.automatic_optimization
        if self._engine is not None:
            self._engine.note_optimizer(self._gradients_ready if automatic else started)
        if self._engine is not None and self._engine.weights is not None:
            self._engine.weights.updated()
        if automatic:
            self.pipelined.step_done()
        return result

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip what this rank has, which may be nothing at all."""
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        if parameters:
            nn.utils.clip_grad_value_(parameters, clip_val)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all stages; over this rank's, where ranks don't wait for others."""
        if self._engine is not None and self._engine.weights is not None:
            nn.utils.clip_grad_norm_(parameters_of(optimizer), clip_val)
            return
        started = time.perf_counter()
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        is_copy = self._engine is not None and self._engine.is_copy
        square = torch.zeros((), dtype=torch.float64, device=self.root_device)
        if gradients and not is_copy:
            square += nn.utils.get_total_norm(gradients).double().square()
        total = sum_over_ranks(square, self.transport).sqrt().to(torch.get_default_dtype())
        nn.utils.clip_grads_with_norm_(parameters, clip_val, total)
        self.pipelined.recorder.paused("clip", started)
        self._gradients_ready = time.perf_counter()

    def leave_engine(self, progress: dict[str, Any]) -> None:
        """The stages go; with the next batch others come, and go on where these were.

        Args:
            progress: What ``progress.collect`` gave.
        """
        self._engine = self._watch = None
        self._evaluations = {}
        self._prepared = {}
        self._resumed, self._resumed_replicas = progress, None

    @override
    def on_train_end(self) -> None:
        self.heads_here.exchange()
        self._driver.end()
        if self._engine is not None:
            self._engine.drain()
            self._engine.shards.restore(self.pipeline_rank, self.transport)
            self._engine.mode.end()
            self._engine = None
            self._evaluations = {}
