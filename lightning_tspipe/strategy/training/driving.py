"""Drivers: Lightning's training hooks call one, and it calls an engine of its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.strategy.setup.asynchronous import begin_step
from lightning_tspipe.strategy.setup.fanout import fanout_of
from lightning_tspipe.strategy.setup.placing import set_up
from lightning_tspipe.strategy.setup.refusals import refuse_result
from lightning_tspipe.strategy.training.optimizers import plain_optimizer

# ruff: noqa: SLF001 - a part of the strategy

if TYPE_CHECKING:
    from lightning_tspipe.strategy.training.steps import TrainingHooks


class Driver(ABC):
    """Drives one kind of engine through the steps of a fit."""

    @property
    @abstractmethod
    def trains_apart(self) -> bool:
        """Whether ranks train parts of the module that have losses of their own."""

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
        strategy: The strategy.
    """

    def __init__(self, strategy: TrainingHooks) -> None:
        self._strategy = strategy

    @property
    def _engine(self) -> PipelineEngine:
        return cast("PipelineEngine", self._strategy._engine)  # which this driver has made

    @property
    @override
    def trains_apart(self) -> bool:
        return fanout_of(self._strategy._module) is not None

    @override
    def set_up(self, batch: Any, step: Step) -> Engine:
        strategy = self._strategy
        return set_up(
            strategy._module,
            strategy.options,
            strategy.transport,
            strategy.root_device,
            strategy.precision_plugin.forward_context,
            step,
            batch,
            [plain_optimizer(optimizer) for optimizer in strategy.optimizers],
            strategy.replicas,
            strategy._origin(),
            strategy.repacking.freezing,
            strategy.plan_of_run,
            strategy.heads_here.cache,
            strategy.pipelined.shortest_reading,
            strategy._stop,
            strategy.pipelined.recorder,
        )

    @override
    def begin(self) -> None:
        self._strategy._manual.commands.attach()

    @override
    def training_step(self, batch: Any, rest: Sequence[Any], batch_idx: int) -> Any:
        strategy, engine = self._strategy, self._engine
        strategy.drain_at_an_end(engine)
        strategy.heads_here.begin_step(engine)
        step = strategy._training_step(rest, batch_idx)
        following: Sequence[Any] = ()
        if strategy.is_data_rank:
            following = strategy._next_batches(batch_idx, engine.lookahead)
        ahead = [
            (later, strategy._training_step(rest, strategy.place_of(batch_idx + offset)))
            for offset, later in enumerate(following, 1)
        ]
        if engine.weights is not None:
            begin_step(engine.weights, strategy._trainer.accumulate_grad_batches, batch_idx)
        automatic = strategy._module.automatic_optimization
        replay = None
        if not automatic:
            replay = strategy._manual.live(strategy._step("training_step", rest, batch_idx))
        result = engine.forward(step, batch, ahead, replay=replay)
        strategy.pipelined.stepped(engine)
        if not automatic:
            strategy._manual.finish()
            strategy.pipelined.step_done()
        if not engine.computes_loss:
            return torch.zeros((), device=strategy.root_device, requires_grad=True)
        if automatic:
            refuse_result(result)
        return result

    @override
    def backward(self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        strategy, engine = self._strategy, self._engine
        if not strategy._module.automatic_optimization:
            return strategy._manual.backward(loss, *args, **kwargs)
        plugin, module = strategy.precision_plugin, strategy._module
        strategy.pre_backward(loss)
        loss = plugin.pre_backward(loss, module)
        run = None
        if engine.computes_loss:
            run = self._backward_of_loss(loss, engine.batch_size, optimizer, *args, **kwargs)
        with plugin.forward_context():
            engine.backward(run, reduce=strategy.reduces)
        loss = plugin.post_backward(loss, module)
        strategy.post_backward(loss)
        strategy.note_gradients()
        return loss

    def _backward_of_loss(
        self, loss: Tensor, batch_size: int, *args: Any, **kwargs: Any
    ) -> Callable[[], None]:
        strategy = self._strategy
        weight = strategy.repacking.weight(batch_size)
        if weight != 1:  # replicas whose samples can't be divided evenly
            loss = loss * weight

        def run() -> None:
            with strategy.replicas.as_world():  # a loss that gathered also spreads gradients
                strategy.precision_plugin.backward(loss, strategy._module, *args, **kwargs)

        return run

    @override
    def end(self) -> None:
        pass
