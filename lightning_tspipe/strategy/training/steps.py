"""The training step: forward, backward, update; and the components that it meets."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.planning.plan import RunPlan
from lightning_tspipe.random_states import RandomStates
from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.replay.purity import is_compared
from lightning_tspipe.runtime.batches.host_memory import give_back_memory
from lightning_tspipe.runtime.execution.engine import Engine, Stopped
from lightning_tspipe.runtime.execution.intake import BatchAndStep
from lightning_tspipe.runtime.execution.mixing import Mixing
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.stages.network import is_paired
from lightning_tspipe.runtime.weights.policies import check_depth
from lightning_tspipe.runtime.weights.state_sharding import StateSharding
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup import refusals
from lightning_tspipe.strategy.setup.declared import declared_delay
from lightning_tspipe.strategy.training.averaging import Averages
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.evaluating import Evaluator
from lightning_tspipe.strategy.training.gradient_watch import GradientWatch
from lightning_tspipe.strategy.training.manual import ManualOptimization
from lightning_tspipe.strategy.training.module_weights import ModuleWeights
from lightning_tspipe.strategy.training.optimizers import hyperparameters, parameters_of
from lightning_tspipe.strategy.training.pipelined import Pipelined
from lightning_tspipe.strategy.training.placing import set_up, whole_batches
from lightning_tspipe.strategy.training.positions import as_of, updates_until
from lightning_tspipe.strategy.training.recapturing import Recapturing
from lightning_tspipe.strategy.training.repacking import Repacking
from lightning_tspipe.strategy.training.step_results import StepResults
from lightning_tspipe.strategy.training.weight_watch import WeightWatch
from lightning_tspipe.strategy.training.windows import (
    begins_window,
    refuse_lost_teacher,
    refuse_window,
    within,
)

log = logging.getLogger("lightning_tspipe")
_OFTEN = 4  # captured again in one epoch: there will be more


class Parts:
    """The components of a run that steps and checkpoints meet; each knows those before it.

    Args:
        run: What they share.

    Attributes:
        run: The same.
        weights: Where values come from when stages are placed.
        results: What steps leave behind, and metrics.
        data: Loaders, batches ahead, transfer.
        evaluator: Validation, test and prediction.
        sharding: Divides what optimizers keep among replicas.
        manual: Optimization by hand.
        repacking: What is frozen, and the mesh.
        recapturing: Whether the step has become another one.
        pipelined: What callbacks may ask.
        averages: What callbacks average of the whole module.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.weights = ModuleWeights(run)
        self.results = StepResults(run)
        self.data = Data(run)
        self.evaluator = Evaluator(run, self.data, self.weights, self.results)
        self.sharding = StateSharding(
            partial(getattr, run, "replicas"), is_on=bool(run.options.zero_stage)
        )
        self.manual = ManualOptimization(run, self.sharding)
        self.repacking = Repacking(run, self.data, self.evaluator, self.sharding)
        self.recapturing = Recapturing(run, self.data)
        self.pipelined = Pipelined(run, self.evaluator, self.repacking)
        self.averages = Averages(run)

    def silent_step(self, rest: Sequence[Any], batch_idx: int) -> Step:
        """The module's ``training_step``, as the trace and the prologue run it."""
        step = self.results.step("training_step", rest, batch_idx)
        by_hand = not self.run.module.automatic_optimization
        return partial(self.manual.run, "silent", step) if by_hand else step


class Training:
    """Runs the training steps of a pipeline: forward, backward, and what surrounds an update.

    Other engines are driven by classes that derive from it.

    Args:
        parts: What a step meets.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._run = parts.run
        self._epoch = -1
        self._epoch_is_through = False
        self._watch: Callable[[], None] | None = None
        self._watched_from = 0
        self._gradients_ready = 0.0
        self._first = 0
        self._captured_again: list[float] = []  # seconds, in this epoch
        self._gradients, self._weights = GradientWatch(()), WeightWatch(())

    def unwatch(self) -> None:
        """What hooks do with gradients and weights is not looked at, until the next step's."""
        self._gradients.stop()
        self._weights.stop()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``training_step``, up to the loss."""
        batch, *rest = (*args, *kwargs.values())
        batch_idx = self._run.trainer.fit_loop.epoch_loop.batch_idx
        data = self._parts.data
        data.has_begun = True
        self.unwatch()
        with self._watched(), self._run.precision_plugin.train_step_context():
            engine = self._run.engine
            # After the first update of an engine; the hooks of all others do the same.
            if self._watch is not None and self._run.trainer.global_step > self._watched_from:
                if engine is not None:
                    self._watch()
                self._watch = None
            if engine is None:
                self._parts.recapturing.forget()
                engine = self._begin(batch, rest, batch_idx)
            data.position = data.position or engine.position
            result = self._training_step(batch, rest, batch_idx)
            self._parts.results.tell(result)
        if not self._run.module.automatic_optimization or self._is_compared():
            self._weights.start()
        return result

    def _is_compared(self) -> bool:
        """Whether this step is one of those in which more is looked at."""
        assert self._run.engine is not None
        seed, number = self._run.engine.position
        return is_compared(number - 1, self._first, seed)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around a step: what it changes on its own rank only is refused."""
        if self._run.num_ranks == 1:
            yield
            return
        # By hand, changes of hyperparameters are told to all.
        watched = self._run.optimizers if self._run.module.automatic_optimization else []
        was_stopped = self._run.trainer.should_stop
        before = list(map(hyperparameters, watched))
        yield
        has_stopped = self._run.trainer.should_stop and not was_stopped
        after = list(map(hyperparameters, watched))
        refusals.refuse_changes(before, after, has_stopped=has_stopped)

    def _begin(
        self, batch: Any, rest: Sequence[Any], batch_idx: int, plan: RunPlan | None = None
    ) -> Engine:
        """Trace the first step, plan, and give every rank its stages.

        Args:
            batch: The batch, on the data rank.
            rest: What Lightning gives ``training_step`` beside.
            batch_idx: Its number.
            plan: By which a step that is known lies among the stages of the one before.
        """
        step = self._parts.recapturing.noting(partial(self._parts.silent_step, rest), batch_idx)
        random = RandomStates.now()
        known = self._parts.recapturing.known
        if known is None:
            self._run.engine = self._set_up(self._parts.data.share(batch), step)
        else:
            self._run.engine = known.place(self._run, self._parts.weights, plan)
        self._parts.weights.forget_others(self._run.engine)
        if not self._run.options.drain_epochs:
            refusals.check_epochs(self._run.trainer, self._run.num_ranks)
        self._run.namespace.optimizers_to_device(self._run.optimizers, self._run.root_device)
        random.restore()  # measuring must not change what the networks draw
        give_back_memory(self._run.root_device)
        self._go_on(self._run.engine, step, batch, batch_idx)
        self._parts.evaluator.release()
        self._watch = self._watch_teacher(self._run.engine)
        module, is_spread = self._run.module, self._run.num_ranks > 1
        spread = [*module.parameters()] if is_spread else []
        self._gradients = GradientWatch(spread)
        self._weights = WeightWatch([*spread, *module.buffers()] if is_spread else [])
        self._first = self._run.engine.position[1]
        self._watched_from = self._run.trainer.global_step
        self._epoch = self._run.trainer.current_epoch
        self._parts.manual.attach()
        self._parts.pipelined.placed(self._run.engine)
        self._parts.results.placed(self._run.engine)
        self._parts.repacking.begun()
        self._parts.weights.placed(self._run.engine)
        self._parts.recapturing.begin(self._run.engine, batch_idx)
        return self._run.engine

    def _go_on(self, engine: Engine, step: Step, batch: Any, batch_idx: int) -> None:
        """If the run is resumed, go on exactly where it was stopped."""
        progress, has_teacher = self._run.resumption.take(), "teacher" in engine.captured.networks
        runs_ahead = has_teacher and self._run.options.schedule == "tspipe"
        if progress is not None:
            is_there = progress.get("place") == [self._run.trainer.current_epoch, batch_idx]
            stopped = Stopped(
                (progress["seed"], progress["step"]),
                progress["teacher_ahead"] if runs_ahead else None,
                progress.get("flights") if is_there else None,
                progress.get("prediction"),
            )
            engine.resume(stopped)
            engine.shards.put_gradients(progress["gradients"], engine.rank)
            engine.late = progress.get("teacher_late")
        refuse_lost_teacher(engine, self._run, batch_idx)
        declared = declared_delay(self._run.trainer)
        # The late teacher of a checkpoint that another strategy made within an epoch.
        weights = declared.take_restored() if declared is not None else {}
        if runs_ahead and batch_idx > 0 and engine.ahead() is None:
            engine.late = weights or engine.late
            self._run_late(engine, step, batch)
        engine.late = None

    def _run_late(self, engine: Engine, step: Step, batch: Any) -> None:
        """Run the teacher's calls of a step that begins, on the weights that it had before."""
        weights, engine.late = engine.late, None
        if weights is not None:
            with attributes_replaced(_late_teacher(self._run.module, weights)):
                engine.run_ahead(step, batch)

    def _watch_teacher(self, engine: Engine) -> Callable[[], None] | None:
        networks = engine.captured.networks
        student, teacher = networks.get("student"), networks.get("teacher")
        is_alone = self._run.num_ranks == 1
        if is_alone or student is None or teacher is None or is_paired(student, teacher):
            return None
        blocks = [self._run.module.get_submodule(name) for name in teacher.block_names]
        return refusals.teacher_check(p for block in blocks for p in block.parameters())

    def _set_up(self, batch: Any, step: Step) -> Engine:
        """Give every rank its stages; all ranks of a pipeline have the same first batch."""
        place = partial(set_up, self._run, self._parts.weights, step, batch, trains=True)
        engine = place()
        is_divided = engine.whole.num_microbatches > 1 and engine.mode.apart is None
        mixing = Mixing(engine).find(step, batch) if is_divided else ""
        if mixing:
            self._run.options = whole_batches(self._run, engine, mixing)
            self._parts.repacking.take_back(engine)
            engine = place()
        return engine

    def _training_step(self, batch: Any, rest: Sequence[Any], batch_idx: int) -> Any:
        """A step up to its loss.

        Args:
            batch: The batch, on the data rank.
            rest: What Lightning gives ``training_step`` beside.
            batch_idx: Its number.
        """
        run, parts = self._run, self._parts
        engine = cast("PipelineEngine", run.engine)  # as it was set up here
        step_of, again = partial(parts.silent_step, rest), parts.recapturing
        begins = self._drain_at_an_end(engine)
        if again.is_another(engine, step_of, batch, batch_idx, begins=begins):
            engine = self._capture_again(engine, batch, rest, batch_idx)
        if begins_window(run, batch_idx):
            is_drained = begins or batch_idx == 0
            engine.begin_window(run.trainer.global_step, is_drained=is_drained)
        step = step_of(batch_idx)
        self._run_late(engine, step, batch)
        parts.results.begin_step(engine)
        again.look_ahead(engine, batch_idx)
        weights, every = engine.weights, run.trainer.accumulate_grad_batches
        if weights is not None:
            if weights.batches_per_update != every:
                check_depth(weights.policy, weights.num_ranks, every)
                refuse_window(weights, engine.captured.plan, every)
            engine.come_to(batch_idx, every)
        ahead = () if again.holds_back else self._ahead(engine, rest, batch_idx)
        automatic = run.module.automatic_optimization
        replay = None
        if not automatic:
            live = parts.results.step("training_step", rest, batch_idx)
            replay = partial(parts.manual.run, "live", live)
        before_update = [within(run, engine.lookahead, updates) for updates in (0, 1)]
        result = engine.forward(step, batch, ahead, replay=replay, before_update=before_update)
        parts.pipelined.stepped(engine)
        if not automatic:
            result = parts.manual.finish(result)
            parts.pipelined.step_done()
            return result
        if not engine.computes_loss:  # Lightning wants one
            return torch.zeros((), device=run.root_device, requires_grad=True)
        refusals.refuse_result(result)
        return result

    def _ahead(
        self, engine: PipelineEngine, rest: Sequence[Any], batch_idx: int
    ) -> list[BatchAndStep]:
        """The next batches and their steps, which see the numbers of their time."""
        trainer, parts = self._run.trainer, self._parts
        length = trainer.fit_loop.max_batches  # behind which the next epoch's follow

        def its_step(offset: int) -> Step:
            step = parts.silent_step(rest, int((batch_idx + offset) % length))
            return as_of(trainer, updates_until(trainer, offset), step)

        most = engine.lookahead
        if not engine.lets_ahead:
            most = within(self._run, most)
        following = parts.data.next_batches(batch_idx, most)
        return [(batch, its_step(offset)) for offset, batch in enumerate(following, 1)]

    def _capture_again(
        self, engine: PipelineEngine, batch: Any, rest: Sequence[Any], batch_idx: int
    ) -> PipelineEngine:
        """Plan for another step, unless it is known, and give stages to ranks."""
        epoch, started = self._run.trainer.current_epoch, time.perf_counter()
        engine.leave()
        known, plan, present = self._parts.recapturing.known, None, self._run.resumption.now
        if known is not None and present is not None:
            plan = known.among(engine, present)
        if plan is None:
            self._parts.repacking.gather(engine)
        else:
            self._parts.repacking.stay(engine)
        engine = cast("PipelineEngine", self._begin(batch, rest, batch_idx, plan))
        if known is not None:
            log.debug("batch %d of epoch %d does what was captured before", batch_idx, epoch)
            return engine
        self._captured_again.append(time.perf_counter() - started)
        if engine.is_loss_rank and self._run.replicas.is_first:
            log.info(
                "from batch %d of epoch %d on the step does something else: it was captured again, "
                "in %.1f s", batch_idx, epoch, self._captured_again[-1],
            )  # fmt: skip
            if len(self._captured_again) == _OFTEN:
                warnings.warn(
                    f"the step goes to and fro: in epoch {epoch} it was captured again {_OFTEN} "
                    f"times, which took {sum(self._captured_again):.1f} s. Make all calls in each "
                    "step, and multiply what is not wanted by 0",
                    stacklevel=2,
                )
        return engine

    def _drain_at_an_end(self, engine: PipelineEngine) -> bool:
        """Behind the end of an epoch, early or not, nothing is left of what ran ahead.

        Returns:
            Whether an epoch begins so.
        """
        trainer = self._run.trainer
        begins = trainer.current_epoch != self._epoch
        if begins:
            begins = self._run.options.drain_epochs or not self._epoch_is_through
            if begins:
                engine.drain()
                self._parts.results.tell_unheard(engine)
                engine.late = None
                self._captured_again.clear()
            self._epoch = trainer.current_epoch
        loop = trainer.fit_loop
        self._epoch_is_through = loop.epoch_loop.batch_idx + 1 == loop.max_batches
        return begins

    def backward(self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """From a loss to the gradients of this rank's parameters."""
        if not self._run.module.automatic_optimization:
            return self._parts.manual.backward_of(loss, *args, **kwargs)
        return self._hooked_backward(loss, optimizer, *args, **kwargs)

    def _hooked_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run = self._run
        plugin, module = run.precision_plugin, run.module
        run.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        self._run_backward(loss, *args, **kwargs)
        engine = run.engine
        # Which is left where the next step begins, or this update ends.
        is_spread = module.automatic_optimization and run.num_ranks > 1
        if engine is not None and is_spread and self._is_compared():
            self._gradients.start(are_partial=engine.gradients_are_partial)
        loss = plugin.post_backward(loss, module)
        run.post_backward(loss)
        self._gradients_ready = time.perf_counter()
        return loss

    def _run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        run, plugin = self._run, self._run.precision_plugin
        engine = run.engine
        assert engine is not None

        def run_backward() -> None:
            # Other than 1 if samples can't be divided evenly among replicas.
            weight = self._parts.repacking.weight(engine.batch_size)
            with run.replicas.as_world():  # a loss that gathered also spreads gradients
                plugin.backward(loss if weight == 1 else loss * weight, run.module, *args, **kwargs)

        with self._weights.idle(), plugin.forward_context():
            engine.backward(run_backward if engine.computes_loss else None, reduce=run.reduces)
        self._parts.recapturing.hold(engine)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While inside, an optimizer makes its step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._gradients.stop()
            if self._run.module.automatic_optimization:  # by hand, the step goes on
                self._weights.start()
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
        weights = None if self._run.engine is None else self._run.engine.weights
        if weights is not None and not weights.policy.is_synchronous:
            nn.utils.clip_grad_norm_(parameters_of(optimizer), clip_val)
            return
        started = time.perf_counter()
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        total = self.norm_of(parameters_of(optimizer))
        nn.utils.clip_grads_with_norm_(parameters, clip_val, total)
        self._run.recorder.paused("clip", started)
        self._gradients_ready = time.perf_counter()

    def norm_of(self, parameters: Iterable[Tensor]) -> Tensor:
        """The 2-norm of gradients over all ranks; every rank calls it, with what it has."""
        parameters, engine = list(parameters), self._run.engine
        copies = set[Tensor]() if engine is None else engine.copies
        if engine is not None and engine.weights is not None:
            engine.settle(keeps_flights=True)  # within a window
        gradients = [p.grad for p in parameters if p.grad is not None and p not in copies]
        # As precise as the gradients, also where this rank has none.
        dtypes = {parameter.dtype for parameter in parameters}
        dtype = reduce(torch.promote_types, dtypes, torch.get_default_dtype())
        square = torch.zeros((), dtype=torch.float64, device=self._run.root_device)
        if gradients:
            square += nn.utils.get_total_norm(gradients).double().square()
        return self._run.transport.sum_over_ranks(square).sqrt().to(dtype)

    def end(self) -> None:
        """The training is over: every rank holds the whole module again."""
        self._parts.results.exchange()
        if self._run.engine is not None:
            self._parts.results.tell_unheard(self._run.engine)
            self._run.engine.drain()
            self._run.engine.shards.restore(self._run.pipeline_rank, self._run.transport)
            self._run.engine.mode.end()
            self._run.engine = None
            self._parts.evaluator.release()


def leave_ended_epoch(loop: Any) -> None:
    """Begin a new epoch where a run goes on from behind the last batch, or the end, of one.

    Lightning 2.6 does that only for checkpoints of an epoch's end, and only without ``max_steps``.
    With it, the ended epoch goes on and ends again after one batch. From behind a last batch, the
    next epoch is trained and never counted as begun: in a checkpoint of it, its place is lost.

    Args:
        loop: The Trainer's ``fit_loop``, when it is about to run.
    """
    progress = loop.epoch_progress
    if loop.restarted_on_epoch_end:
        progress.increment_completed()
    is_behind_last = progress.current.processed == progress.current.started
    is_left = loop.restarted_on_epoch_end or (loop.restarted_mid_epoch and is_behind_last)
    if not (is_left or loop.resumed_on_epoch_end):
        return
    loop.reset_restart_stage()
    for each in (loop, loop.epoch_loop, *vars(loop.epoch_loop).values()):
        if hasattr(each, "_restarting"):
            each._restarting = False  # noqa: SLF001 - its setter would say otherwise
    # Of a loader without a length it has fetched a batch, before what hooks draw: once more.
    loop._resuming_from_checkpoint = False  # noqa: SLF001


def _late_teacher(
    module: nn.Module, weights: dict[str, Tensor]
) -> Iterator[tuple[Tensor, str, Tensor]]:
    """The data that tensors of this rank have for a while.

    Args:
        module: The LightningModule.
        weights: Values by dotted name. Buffers of modules in train mode keep their own: their
            forwards update them.
    """
    for name, value in weights.items():
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        tensor = getattr(owner, key)
        if not tensor.is_meta and not (key in owner._buffers and owner.training):  # noqa: SLF001
            yield tensor, "data", value.to(tensor.device)
