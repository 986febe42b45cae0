"""The training step in Lightning's hooks: forward, backward, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.profiling import is_paired
from lightning_tspipe.runtime.batches.host_memory import give_back_memory
from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.transport.sums import sum_over_ranks
from lightning_tspipe.strategy.lightning.base import LightningStrategy, StrategyArguments
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.asynchronous import begin_step, check_epochs
from lightning_tspipe.strategy.setup.placing import set_up
from lightning_tspipe.strategy.setup.refusals import (
    TeacherWatch,
    refuse_hyperparameters,
    refuse_result,
    refuse_stop,
)
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.evaluating import Evaluator
from lightning_tspipe.strategy.training.head_logs import HeadsHere
from lightning_tspipe.strategy.training.manual import ManualOptimization
from lightning_tspipe.strategy.training.module_weights import ModuleWeights
from lightning_tspipe.strategy.training.optimizers import (
    hyperparameters,
    parameters_of,
    plain_optimizer,
)
from lightning_tspipe.strategy.training.pipelined import Pipelined
from lightning_tspipe.strategy.training.progress import Progress, Resumption, late_teacher, restore
from lightning_tspipe.strategy.training.relaying import Relaying
from lightning_tspipe.strategy.training.repacking import Repacking

if TYPE_CHECKING:
    from torch.optim import Optimizer


class TrainingHooks(LightningStrategy):
    """The part of the strategy that trains."""

    data: Data
    evaluator: Evaluator
    pipelined: Pipelined
    _weights: ModuleWeights
    _resumption: Resumption
    _manual: ManualOptimization
    _relaying: Relaying
    heads_here: HeadsHere
    repacking: Repacking

    def __init__(self, run: Run, **kwargs: Unpack[StrategyArguments]) -> None:
        self.run = run
        super().__init__(**kwargs)
        self._epoch = -1
        self._epoch_is_through = False
        self._watch: TeacherWatch | None = None
        self._watched_from = 0
        self._gradients_ready = 0.0

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        batch_idx = self.run.trainer.fit_loop.epoch_loop.batch_idx
        self.data.has_begun = True
        with self._watched(), self.precision_plugin.train_step_context():
            if self._watch is not None and self.run.trainer.global_step > self._watched_from:
                # After the first update; the hooks of all others do the same.
                self._watch.check()
                self._watch = None
            step = self._training_step(rest, batch_idx)
            engine = self.run.engine or self._begin(batch, step, batch_idx)
            self.data.position = self.data.position or engine.position
            if self._relaying.is_on:
                step = self.data.step("training_step", rest, batch_idx)
                result = self._relaying.training_step(step, batch, batch_idx)
                self.pipelined.stepped(engine)
                if not self.run.module.automatic_optimization:
                    self.pipelined.step_done()
                return result
            self._drain_at_an_end(engine)
            self.heads_here.begin_step(engine)
            following = self.data.next_batches(batch_idx, engine.lookahead)
            ahead = [
                (later, self._training_step(rest, self._place_of(batch_idx + offset)))
                for offset, later in enumerate(following, 1)
            ]
            if engine.weights is not None:
                begin_step(engine.weights, self.run.trainer.accumulate_grad_batches, batch_idx)
            automatic = self.run.module.automatic_optimization
            replay = None if automatic else self.data.step("training_step", rest, batch_idx)
            result = engine.forward(
                step, batch, ahead, replay=None if replay is None else self._manual.live(replay)
            )
            self.pipelined.stepped(engine)
            if not automatic:
                self._manual.finish()
                self.pipelined.step_done()
        if engine.computes_loss:
            if automatic:
                refuse_result(result)
            return result
        return torch.zeros((), device=self.root_device, requires_grad=True)

    def _place_of(self, batch_idx: int) -> int:
        """Of a batch that follows, its place in its epoch, which may be the next one."""
        length = self.run.trainer.fit_loop.max_batches
        return batch_idx if batch_idx < length else int(batch_idx - length)

    def _drain_at_an_end(self, engine: Engine) -> None:
        """Behind the end of an epoch, early or not, nothing is left of what ran ahead."""
        if self.run.trainer.current_epoch != self._epoch:
            if self.run.options.drain_epochs or not self._epoch_is_through:
                engine.drain()
            self._epoch = self.run.trainer.current_epoch
        loop = self.run.trainer.fit_loop
        self._epoch_is_through = loop.epoch_loop.batch_idx + 1 == loop.max_batches

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around a step: what it changes on its own rank only is refused."""
        if self.run.num_ranks == 1:
            yield
            return
        was_stopped = self.run.trainer.should_stop
        before = self._hyperparameters()
        yield
        refuse_stop(self.run.trainer, before=was_stopped)
        refuse_hyperparameters(before, self._hyperparameters())

    def _hyperparameters(self) -> list[Any]:
        """What the groups hold beside their parameters; by hand, their changes are told to all."""
        if not self.run.module.automatic_optimization:
            return []
        return [hyperparameters(optimizer) for optimizer in self.optimizers]

    def _training_step(self, rest: Sequence[Any], batch_idx: int) -> Step:
        """The user's step, as the trace and the prologue run it."""
        step = self.data.step("training_step", rest, batch_idx)
        return step if self.run.module.automatic_optimization else self._manual.silent(step)

    def _begin(self, batch: Any, step: Step, batch_idx: int) -> Engine:
        """Trace the first step, plan, and give every rank its stages."""
        random = RandomStates.now()
        first = self.data.share(batch)
        if self._relaying.is_on:
            self.run.engine = self._relaying.set_up(first)
        else:
            self.run.engine = set_up(
                self.run.module,
                self.run.options,
                self.run.transport,
                self.root_device,
                self.precision_plugin.forward_context,
                step,
                first,
                [plain_optimizer(optimizer) for optimizer in self.optimizers],
                self.run.replicas,
                self._weights.initial,
                self.repacking.freezing,
                self.run.plan,
                self.heads_here.cache,
                self.data.shortest_reading,
            )
        if not self.run.options.drain_epochs:
            check_epochs(self.run.trainer, self.run.num_ranks)
        self.run.engine.stop = self.run.stop
        self.namespace.optimizers_to_device(self.optimizers, self.root_device)
        random.restore()  # measuring must not change what the networks draw
        if self.root_device.type == "cpu":
            give_back_memory(self.root_device)
        self._go_on(self.run.engine, step, batch, batch_idx)
        self.evaluator.release()
        self._watch = self._watch_teacher()
        self._watched_from = self.run.trainer.global_step
        if not self._relaying.is_on:
            self._manual.commands.attach()
        self.pipelined.placed(self.run.engine)
        self.heads_here.placed(self.run.engine)
        self.repacking.begun()
        self._weights.placed(self.run.engine)
        return self.run.engine

    def _go_on(self, engine: Engine, step: Step, batch: Any, batch_idx: int) -> None:
        """If the run is resumed, go on exactly where it was stopped."""
        progress = self._resumption.take()
        runs_ahead = self.run.options.schedule == "tspipe" and "teacher" in engine.captured.networks
        if progress is not None:
            place = self.run.trainer.current_epoch, batch_idx
            restore(engine, progress, place, runs_ahead=runs_ahead)
        declared = self.data.declared_delay
        # The late teacher of a checkpoint that another strategy made within an epoch.
        weights = declared.take_restored() if declared is not None else {}
        if weights and runs_ahead and batch_idx > 0 and engine.ahead() is None:
            with late_teacher(self.run.module, weights):
                engine.run_ahead(step, batch)
        self._epoch = self.run.trainer.current_epoch

    def _watch_teacher(self) -> TeacherWatch | None:
        engine = self.run.engine
        assert engine is not None
        networks = engine.captured.networks
        teacher = networks.get("teacher")
        if engine.heads is not None:
            return None
        if self.run.num_ranks == 1 or teacher is None or is_paired(networks["student"], teacher):
            return None
        blocks = [self.run.module.get_submodule(name) for name in teacher.block_names]
        return TeacherWatch(p for block in blocks for p in block.parameters())

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._relaying.is_on:
            loss = self._relaying.backward(
                closure_loss, optimizer, self.run.reduces, *args, **kwargs
            )
            self._gradients_ready = time.perf_counter()
            return loss
        if not self.run.module.automatic_optimization:
            return self._manual.backward(closure_loss, *args, **kwargs)
        engine = self.run.engine
        assert engine is not None
        plugin, module = self.precision_plugin, self.run.module
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        run = None
        if engine.computes_loss:
            run = self._backward_of_loss(closure_loss, optimizer, *args, **kwargs)
        with plugin.forward_context():
            engine.backward(run, reduce=self.run.reduces)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        self._gradients_ready = time.perf_counter()
        return closure_loss

    def _backward_of_loss(self, loss: Tensor, *args: Any, **kwargs: Any) -> Callable[[], None]:
        weight = self.repacking.weight(
            self.run.engine.batch_size if self.run.engine is not None else 1
        )
        if weight != 1:  # replicas whose samples can't be divided evenly
            loss = loss * weight

        def run() -> None:
            with self.run.replicas.as_world():  # a loss that gathered also spreads gradients
                self.precision_plugin.backward(loss, self.run.module, *args, **kwargs)

        return run

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While inside, gradients are only added up: there are more batches before the update."""
        self.run.reduces = False
        try:
            yield
        finally:
            self.run.reduces = True

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
        automatic = self.run.module.automatic_optimization
        if self.run.engine is not None:
            self.run.engine.note_optimizer(self._gradients_ready if automatic else started)
        if self.run.engine is not None and self.run.engine.weights is not None:
            self.run.engine.weights.updated()
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
        if self.run.engine is not None and self.run.engine.weights is not None:
            nn.utils.clip_grad_norm_(parameters_of(optimizer), clip_val)
            return
        started = time.perf_counter()
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        is_copy = self.run.engine is not None and self.run.engine.is_copy
        square = torch.zeros((), dtype=torch.float64, device=self.root_device)
        if gradients and not is_copy:
            square += nn.utils.get_total_norm(gradients).double().square()
        total = sum_over_ranks(square, self.run.transport).sqrt().to(torch.get_default_dtype())
        nn.utils.clip_grads_with_norm_(parameters, clip_val, total)
        self.pipelined.recorder.paused("clip", started)
        self._gradients_ready = time.perf_counter()

    def leave_engine(self, progress: Progress) -> None:
        """The stages go; with the next batch others come, and go on where these were.

        Args:
            progress: What ``progress.collect`` gave.
        """
        self.run.engine = self._watch = None
        self.evaluator.release()
        self.data.prepared = {}
        self._resumption.here, self._resumption.replicas = progress, None

    @override
    def on_train_end(self) -> None:
        self.heads_here.exchange()
        self._relaying.end()
        if self.run.engine is not None:
            self.run.engine.drain()
            self.run.engine.shards.restore(self.run.pipeline_rank, self.run.transport)
            self.heads_here.ended(self.run.engine)
            self.run.engine = None
            self.evaluator.release()
