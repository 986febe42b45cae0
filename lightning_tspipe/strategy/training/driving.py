"""Drivers: Lightning's training hooks call one, and it calls an engine of its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.asynchronous import begin_step
from lightning_tspipe.strategy.setup.placing import set_up
from lightning_tspipe.strategy.setup.refusals import refuse_result
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.head_logs import HeadsHere
from lightning_tspipe.strategy.training.manual import ManualOptimization
from lightning_tspipe.strategy.training.module_weights import ModuleWeights
from lightning_tspipe.strategy.training.optimizers import plain_optimizer
from lightning_tspipe.strategy.training.pipelined import Pipelined
from lightning_tspipe.strategy.training.repacking import Repacking


@dataclass(frozen=True)
class Parts:
    """Components that a training step meets.

    Attributes:
        run: The run.
        data: Its batches.
        weights: Where values come from when stages are placed.
        manual: Optimization by hand.
        heads: Those of a fan-out.
        repacking: Changes what is frozen.
        pipelined: What callbacks may ask.
    """

    run: Run
    data: Data
    weights: ModuleWeights
    manual: ManualOptimization
    heads: HeadsHere
    repacking: Repacking
    pipelined: Pipelined

    def silent_step(self, rest: Sequence[Any], batch_idx: int) -> Step:
        """The module's ``training_step``, as the trace and the prologue run it."""
        step = self.data.step("training_step", rest, batch_idx)
        return step if self.run.module.automatic_optimization else self.manual.silent(step)


class Driver(ABC):
    """Drives one kind of engine through the steps of a fit."""

    @abstractmethod
    def set_up(self, batch: Any, step: Step) -> Engine:
        """Give every rank its stages; all ranks of a pipeline have the same first batch."""

    @abstractmethod
    def begin(self) -> None:
        """The engine is there, and goes on where another one stopped."""

    @abstractmethod
    def training_step(self, batch: Any, rest: Sequence[Any], batch_idx: int) -> Any:
        """One step up to its loss.

        Args:
            batch: The batch, on the data rank.
            rest: What Lightning gives ``training_step`` beside.
            batch_idx: Its number.
        """

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The backward of a step."""

    @abstractmethod
    def end(self) -> None:
        """The training is over."""


@final
class PipelineDriver(Driver):
    """Drives a pipeline.

    Args:
        parts: What a step meets.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._run = parts.run
        self._epoch = -1
        self._epoch_is_through = False

    @property
    def _engine(self) -> PipelineEngine:
        return cast("PipelineEngine", self._run.engine)  # which this driver has made

    @override
    def set_up(self, batch: Any, step: Step) -> Engine:
        run, parts = self._run, self._parts
        return set_up(
            run.module,
            run.options,
            run.transport,
            run.root_device,
            run.precision_plugin.forward_context,
            step,
            batch,
            [plain_optimizer(optimizer) for optimizer in run.optimizers],
            run.replicas,
            parts.weights.initial,
            parts.repacking.freezing,
            run.plan,
            parts.heads.cache,
            parts.data.shortest_reading,
            run.stop,
            run.recorder,
        )

    @override
    def begin(self) -> None:
        self._epoch = self._run.trainer.current_epoch
        self._parts.manual.commands.attach()

    @override
    def training_step(self, batch: Any, rest: Sequence[Any], batch_idx: int) -> Any:
        run, parts, engine = self._run, self._parts, self._engine
        self._drain_at_an_end(engine)
        parts.heads.begin_step(engine)
        step = parts.silent_step(rest, batch_idx)
        following = parts.data.next_batches(batch_idx, engine.lookahead)
        ahead = [
            (later, parts.silent_step(rest, self._place_of(batch_idx + offset)))
            for offset, later in enumerate(following, 1)
        ]
        if engine.weights is not None:
            begin_step(engine.weights, run.trainer.accumulate_grad_batches, batch_idx)
        automatic = run.module.automatic_optimization
        replay = None
        if not automatic:
            replay = parts.manual.live(parts.data.step("training_step", rest, batch_idx))
        result = engine.forward(step, batch, ahead, replay=replay)
        parts.pipelined.stepped(engine)
        if not automatic:
            parts.manual.finish()
            parts.pipelined.step_done()
        if not engine.computes_loss:
            return torch.zeros((), device=run.root_device, requires_grad=True)
        if automatic:
            refuse_result(result)
        return result

    def _place_of(self, batch_idx: int) -> int:
        """Of a batch that follows, its place in its epoch, which may be the next one."""
        length = self._run.trainer.fit_loop.max_batches
        return batch_idx if batch_idx < length else int(batch_idx - length)

    def _drain_at_an_end(self, engine: PipelineEngine) -> None:
        """Behind the end of an epoch, early or not, nothing is left of what ran ahead."""
        trainer = self._run.trainer
        if trainer.current_epoch != self._epoch:
            if self._run.options.drain_epochs or not self._epoch_is_through:
                engine.drain()
            self._epoch = trainer.current_epoch
        loop = trainer.fit_loop
        self._epoch_is_through = loop.epoch_loop.batch_idx + 1 == loop.max_batches

    @override
    def backward(self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        run, engine = self._run, self._engine
        if not run.module.automatic_optimization:
            return self._parts.manual.backward(loss, *args, **kwargs)
        plugin, module = run.precision_plugin, run.module
        run.lightning.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        run_backward = None
        if engine.computes_loss:
            run_backward = self._backward_of_loss(loss, optimizer, *args, **kwargs)
        with plugin.forward_context():
            engine.backward(run_backward, reduce=run.reduces)
        loss = plugin.post_backward(loss, module)
        run.lightning.post_backward(loss)
        return loss

    def _backward_of_loss(self, loss: Tensor, *args: Any, **kwargs: Any) -> Callable[[], None]:
        run = self._run
        weight = self._parts.repacking.weight(self._engine.batch_size)
        if weight != 1:  # replicas whose samples can't be divided evenly
            loss = loss * weight

        def run_backward() -> None:
            with run.replicas.as_world():  # a loss that gathered also spreads gradients
                run.precision_plugin.backward(loss, run.module, *args, **kwargs)

        return run_backward

    @override
    def end(self) -> None:
        pass
