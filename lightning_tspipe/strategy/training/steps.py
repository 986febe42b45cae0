"""The training step: forward, backward, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
from lightning_tspipe.strategy.training.progress import Resumption, late_teacher, restore
from lightning_tspipe.strategy.training.relaying import Relaying
from lightning_tspipe.strategy.training.repacking import Repacking

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Training:
    """Runs training steps: forward, backward, and what surrounds an update.

    Args:
        run: The run.
        data: Its batches.
        evaluator: Evaluations, which follow the stages.
        weights: Where values come from when stages are placed.
        resumption: Where the run goes on.
        manual: Optimization by hand.
        relaying: Blockwise distillation.
        heads: Those of a fan-out.
        repacking: Changes what is frozen.
        pipelined: What callbacks may ask.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - a step meets all of them
        self,
        run: Run,
        data: Data,
        evaluator: Evaluator,
        weights: ModuleWeights,
        resumption: Resumption,
        manual: ManualOptimization,
        relaying: Relaying,
        heads: HeadsHere,
        repacking: Repacking,
        pipelined: Pipelined,
    ) -> None:
        self._run = run
        self._data = data
        self._evaluator = evaluator
        self._weights = weights
        self._resumption = resumption
        self._manual = manual
        self._relaying = relaying
        self._heads = heads
        self._repacking = repacking
        self._pipelined = pipelined
        self._epoch = -1
        self._epoch_is_through = False
        self._watch: TeacherWatch | None = None
        self._watched_from = 0
        self._gradients_ready = 0.0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``training_step``, up to the loss."""
        batch, *rest = (*args, *kwargs.values())
        batch_idx = self._run.trainer.fit_loop.epoch_loop.batch_idx
        self._data.has_begun = True
        with self._watched(), self._run.precision_plugin.train_step_context():
            self._check_teacher()
            step = self._training_step(rest, batch_idx)
            engine = self._run.engine or self._begin(batch, step, batch_idx)
            self._data.position = self._data.position or engine.position
            if self._relaying.is_on:
                step = self._data.step("training_step", rest, batch_idx)
                result = self._relaying.training_step(step, batch, batch_idx)
                self._pipelined.stepped(engine)
                if not self._run.module.automatic_optimization:
                    self._pipelined.step_done()
                return result
            self._drain_at_an_end(engine)
            self._heads.begin_step(engine)
            following = self._data.next_batches(batch_idx, engine.lookahead)
            ahead = [
                (later, self._training_step(rest, self._place_of(batch_idx + offset)))
                for offset, later in enumerate(following, 1)
            ]
            if engine.weights is not None:
                begin_step(engine.weights, self._run.trainer.accumulate_grad_batches, batch_idx)
            automatic = self._run.module.automatic_optimization
            replay = None if automatic else self._data.step("training_step", rest, batch_idx)
            result = engine.forward(
                step, batch, ahead, replay=None if replay is None else self._manual.live(replay)
            )
            self._pipelined.stepped(engine)
            if not automatic:
                self._manual.finish()
                self._pipelined.step_done()
        if engine.computes_loss:
            if automatic:
                refuse_result(result)
            return result
        return torch.zeros((), device=self._run.root_device, requires_grad=True)

    def _place_of(self, batch_idx: int) -> int:
        """Of a batch that follows, its place in its epoch, which may be the next one."""
        length = self._run.trainer.fit_loop.max_batches
        return batch_idx if batch_idx < length else int(batch_idx - length)

    def _drain_at_an_end(self, engine: Engine) -> None:
        """Behind the end of an epoch, early or not, nothing is left of what ran ahead."""
        if self._run.trainer.current_epoch != self._epoch:
            if self._run.options.drain_epochs or not self._epoch_is_through:
                engine.drain()
            self._epoch = self._run.trainer.current_epoch
        loop = self._run.trainer.fit_loop
        self._epoch_is_through = loop.epoch_loop.batch_idx + 1 == loop.max_batches

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

    def _training_step(self, rest: Sequence[Any], batch_idx: int) -> Step:
        """The user's step, as the trace and the prologue run it."""
        step = self._data.step("training_step", rest, batch_idx)
        return step if self._run.module.automatic_optimization else self._manual.silent(step)

    def _begin(self, batch: Any, step: Step, batch_idx: int) -> Engine:
        """Trace the first step, plan, and give every rank its stages."""
        random = RandomStates.now()
        first = self._data.share(batch)
        if self._relaying.is_on:
            self._run.engine = self._relaying.set_up(first)
        else:
            self._run.engine = set_up(
                self._run.module,
                self._run.options,
                self._run.transport,
                self._run.root_device,
                self._run.precision_plugin.forward_context,
                step,
                first,
                [plain_optimizer(optimizer) for optimizer in self._run.optimizers],
                self._run.replicas,
                self._weights.initial,
                self._repacking.freezing,
                self._run.plan,
                self._heads.cache,
                self._data.shortest_reading,
            )
        if not self._run.options.drain_epochs:
            check_epochs(self._run.trainer, self._run.num_ranks)
        self._run.engine.stop = self._run.stop
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
        if not self._relaying.is_on:
            self._manual.commands.attach()
        self._pipelined.placed(self._run.engine)
        self._heads.placed(self._run.engine)
        self._repacking.begun()
        self._weights.placed(self._run.engine)
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
        declared = self._data.declared_delay
        # The late teacher of a checkpoint that another strategy made within an epoch.
        weights = declared.take_restored() if declared is not None else {}
        if weights and runs_ahead and batch_idx > 0 and engine.ahead() is None:
            with late_teacher(self._run.module, weights):
                engine.run_ahead(step, batch)
        self._epoch = self._run.trainer.current_epoch

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
        teacher = networks.get("teacher")
        if engine.heads is not None:
            return None
        if self._run.num_ranks == 1 or teacher is None or is_paired(networks["student"], teacher):
            return None
        blocks = [self._run.module.get_submodule(name) for name in teacher.block_names]
        return TeacherWatch(p for block in blocks for p in block.parameters())

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """From a loss to the gradients of this rank's parameters."""
        if self._relaying.is_on:
            loss = self._relaying.backward(
                closure_loss, optimizer, self._run.reduces, *args, **kwargs
            )
            self._gradients_ready = time.perf_counter()
            return loss
        if not self._run.module.automatic_optimization:
            return self._manual.backward(closure_loss, *args, **kwargs)
        engine = self._run.engine
        assert engine is not None
        plugin, module = self._run.precision_plugin, self._run.module
        self._run.lightning.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        run = None
        if engine.computes_loss:
            run = self._backward_of_loss(closure_loss, optimizer, *args, **kwargs)
        with plugin.forward_context():
            engine.backward(run, reduce=self._run.reduces)
        closure_loss = plugin.post_backward(closure_loss, module)
        self._run.lightning.post_backward(closure_loss)
        self._gradients_ready = time.perf_counter()
        return closure_loss

    def _backward_of_loss(self, loss: Tensor, *args: Any, **kwargs: Any) -> Callable[[], None]:
        weight = self._repacking.weight(
            self._run.engine.batch_size if self._run.engine is not None else 1
        )
        if weight != 1:  # replicas whose samples can't be divided evenly
            loss = loss * weight

        def run() -> None:
            with self._run.replicas.as_world():  # a loss that gathered also spreads gradients
                self._run.precision_plugin.backward(loss, self._run.module, *args, **kwargs)

        return run

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
            self._pipelined.step_done()

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
        self._heads.exchange()
        self._relaying.end()
        if self._run.engine is not None:
            self._run.engine.drain()
            self._run.engine.shards.restore(self._run.pipeline_rank, self._run.transport)
            self._heads.ended(self._run.engine)
            self._run.engine = None
            self._evaluator.release()
