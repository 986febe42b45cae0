"""The training step: forward, backward, update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.profiling import is_paired
from lightning_tspipe.runtime.batches.host_memory import give_back_memory
from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.transport.sums import sum_over_ranks
from lightning_tspipe.strategy.setup.asynchronous import check_epochs
from lightning_tspipe.strategy.setup.refusals import (
    TeacherWatch,
    refuse_hyperparameters,
    refuse_stop,
)
from lightning_tspipe.strategy.training.driving import Driver, Parts, PipelineDriver
from lightning_tspipe.strategy.training.evaluating import Evaluator
from lightning_tspipe.strategy.training.optimizers import (
    hyperparameters,
    parameters_of,
)
from lightning_tspipe.strategy.training.progress import Resumption, late_teacher, restore
from lightning_tspipe.strategy.training.relaying import driver_of

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Training:
    """Runs training steps: forward, backward, and what surrounds an update.

    Args:
        parts: What a step meets.
        evaluator: Evaluations, which follow the stages.
        resumption: Where the run goes on.
    """

    def __init__(self, parts: Parts, evaluator: Evaluator, resumption: Resumption) -> None:
        self._parts = parts
        self._run = parts.run
        self._evaluator = evaluator
        self._resumption = resumption
        self._driver: Driver = PipelineDriver(parts)  # until it is known what is trained
        self._watch: TeacherWatch | None = None
        self._watched_from = 0
        self._gradients_ready = 0.0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``training_step``, up to the loss."""
        batch, *rest = (*args, *kwargs.values())
        batch_idx = self._run.trainer.fit_loop.epoch_loop.batch_idx
        data = self._parts.data
        data.has_begun = True
        with self._watched(), self._run.precision_plugin.train_step_context():
            self._check_teacher()
            engine = self._run.engine
            if engine is None:
                engine = self._begin(batch, self._parts.silent_step(rest, batch_idx), batch_idx)
            data.position = data.position or engine.position
            return self._driver.training_step(batch, rest, batch_idx)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around a step: what it changes on its own rank only is refused."""
        if self._run.num_ranks == 1:
            yield
            return
        was_stopped = self._run.trainer.should_stop
        before = self._hyperparameters()
        yield
        refuse_stop(self._run.trainer, before=was_stopped)
        refuse_hyperparameters(before, self._hyperparameters())

    def _hyperparameters(self) -> list[Any]:
        """What the groups hold beside their parameters; by hand, their changes are told to all."""
        if not self._run.module.automatic_optimization:
            return []
        return [hyperparameters(optimizer) for optimizer in self._run.optimizers]

    def _begin(self, batch: Any, step: Step, batch_idx: int) -> Engine:
        """Trace the first step, plan, and give every rank its stages."""
        random = RandomStates.now()
        first = self._parts.data.share(batch)
        self._driver = driver_of(self._parts)
        self._run.engine = self._driver.set_up(first, step)
        if not self._run.options.drain_epochs:
            check_epochs(self._run.trainer, self._run.num_ranks)
        self._run.lightning.namespace.optimizers_to_device(
            self._run.optimizers, self._run.root_device
        )
        random.restore()  # measuring must not change what the networks draw
        if self._run.root_device.type == "cpu":
            give_back_memory(self._run.root_device)
        self._go_on(self._run.engine, step, batch, batch_idx)
        self._evaluator.release()
        self._watch = self._watch_teacher()
        self._watched_from = self._run.trainer.global_step
        self._driver.begin()
        self._parts.pipelined.placed(self._run.engine)
        self._parts.heads.placed(self._run.engine)
        self._parts.repacking.begun()
        self._parts.weights.placed(self._run.engine)
        return self._run.engine

    def _go_on(self, engine: Engine, step: Step, batch: Any, batch_idx: int) -> None:
        """If the run is resumed, go on exactly where it was stopped."""
        progress = self._resumption.take()
        runs_ahead = (
            self._run.options.schedule == "tspipe" and "teacher" in engine.captured.networks
        )
        if progress is not None:
            place = self._run.trainer.current_epoch, batch_idx
            restore(engine, progress, place, runs_ahead=runs_ahead)
        declared = self._parts.data.declared_delay
        # The late teacher of a checkpoint that another strategy made within an epoch.
        weights = declared.take_restored() if declared is not None else {}
        if weights and runs_ahead and batch_idx > 0 and engine.ahead() is None:
            with late_teacher(self._run.module, weights):
                engine.run_ahead(step, batch)

    def _check_teacher(self) -> None:
        """After the first update of an engine; the hooks of all others do the same."""
        run = self._run
        if self._watch is not None and run.trainer.global_step > self._watched_from:
            if run.engine is not None:
                self._watch.check()
            self._watch = None

    def _watch_teacher(self) -> TeacherWatch | None:
        engine = self._run.engine
        assert engine is not None
        networks = engine.captured.networks
        student, teacher = networks.get("student"), networks.get("teacher")
        is_alone = self._run.num_ranks == 1
        if is_alone or student is None or teacher is None or is_paired(student, teacher):
            return None
        blocks = [self._run.module.get_submodule(name) for name in teacher.block_names]
        return TeacherWatch(p for block in blocks for p in block.parameters())

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """From a loss to the gradients of this rank's parameters."""
        loss = self._driver.backward(closure_loss, optimizer, *args, **kwargs)
        self._gradients_ready = time.perf_counter()
        return loss

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """While inside, gradients are only added up: there are more batches before the update."""
        self._run.reduces = False
        try:
            yield
        finally:
            self._run.reduces = True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While inside, an optimizer makes its step."""
        started = time.perf_counter()
        yield
        engine, automatic = self._run.engine, self._run.module.automatic_optimization
        if engine is not None:
            engine.note_optimizer(self._gradients_ready if automatic else started)
            if engine.weights is not None:
                engine.weights.updated()
        if automatic:
            self._parts.pipelined.step_done()

    def clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip what this rank has, which may be nothing at all."""
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        if parameters:
            nn.utils.clip_grad_value_(parameters, clip_val)

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all stages; over this rank's, where ranks don't wait for others."""
        if self._run.engine is not None and self._run.engine.weights is not None:
            nn.utils.clip_grad_norm_(parameters_of(optimizer), clip_val)
            return
        started = time.perf_counter()
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        is_copy = self._run.engine is not None and self._run.engine.is_copy
        square = torch.zeros((), dtype=torch.float64, device=self._run.root_device)
        if gradients and not is_copy:
            square += nn.utils.get_total_norm(gradients).double().square()
        total = sum_over_ranks(square, self._run.transport).sqrt().to(torch.get_default_dtype())
        nn.utils.clip_grads_with_norm_(parameters, clip_val, total)
        self._run.recorder.paused("clip", started)
        self._gradients_ready = time.perf_counter()

    def end(self) -> None:
        """The training is over: every rank holds the whole module again."""
        self._parts.heads.exchange()
        self._driver.end()
        if self._run.engine is not None:
            self._run.engine.drain()
            self._run.engine.shards.restore(self._run.pipeline_rank, self._run.transport)
            self._run.engine.mode.end()
            self._run.engine = None
            self._evaluator.release()
