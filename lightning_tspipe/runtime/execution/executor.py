"""The executor: walks one rank's actions of a step; one handler per op."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import NetworkName, ValueRef
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.split_backward import SplitBackward
from lightning_tspipe.runtime.execution.buffers import Exchange
from lightning_tspipe.runtime.execution.context import (
    Saved,
    StepContext,
    backward_of,
    base_of,
    has_backward,
    unshared,
)
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.stages.running import Execution, InPieces
from lightning_tspipe.runtime.stages.statistics import CallStatistics
from lightning_tspipe.runtime.stages.units import NETWORK_OF
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.weights.teacher_prediction import TeacherPrediction
from lightning_tspipe.runtime.weights.versions import StageWeights


class Executor(Exchange):
    """Runs the actions of one rank.

    Args:
        transport: How to reach the other ranks.
        networks: The networks; the rank's own stages hold real parameters.
        statistics: Deferred BatchNorm statistics of each network.
        forward_context: The precision plugin's forward context.
        device: Where this rank computes.
        executions: How the atoms of networks run, if not as they are.

    Attributes:
        statistics: When BatchNorm statistics count.
        weights: Which version of its weights the student reads; None: always the current one.
        teacher: Predicts the weights of a teacher that runs ahead; None: it reads its own.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank
        self,
        transport: Transport,
        networks: dict[NetworkName, ChainNetwork],
        statistics: dict[NetworkName, DeferredStatistics],
        forward_context: Callable[[], AbstractContextManager[None]],
        device: torch.device,
        executions: Mapping[NetworkName, Execution | InPieces] | None = None,
    ) -> None:
        super().__init__(transport, device)
        self._executions = executions or {}
        self._networks = networks
        self.statistics = CallStatistics(statistics)
        self._context = forward_context
        self.weights: StageWeights | None = None
        self.teacher: TeacherPrediction | None = None
        self._handlers: dict[Op, Callable[[StepContext, Action], None]] = {
            Op.FORWARD: self._forward,
            Op.TEACHER: self._forward,
            Op.BACKWARD: self._backward,
            Op.INPUT_BACKWARD: self._input_backward,
            Op.WEIGHT_BACKWARD: self._weight_backward,
        }

    def run(self, step: StepContext, actions: Sequence[Action]) -> None:
        """Run some of the step's actions, in order."""
        for action in actions:
            handler = self._handlers.get(action.op)
            if handler is None or not step.units[action.batch].runs(action):
                continue
            self._await(step, action)
            started = time.perf_counter()
            handler(step, action)
            self.recorder.ran(step.index, action, started, *self._read(action))
            self.send(step, action)

    def _read(self, action: Action) -> tuple[int, int] | tuple[()]:
        """The version of the weights that an action has read, and the updates predicted on it."""
        read = None if self.weights is None else self.weights.last
        if read is None or action.op not in {Op.FORWARD, Op.BACKWARD}:
            return ()
        return read.version, read.predicted

    def finish(self, step: StepContext, *, in_training: bool = True) -> None:
        """The step is over: forget what belongs to it."""
        self._forget(step.index)
        self.statistics.finish(step.index)
        if self.weights is not None:
            self.weights.trained(step.index)
        self._finish_sends(step.index, in_training=in_training)

    def repeat(self, step: StepContext, action: Action, inputs: Tensors) -> None:
        """Run a forward for its backward alone: others have what it gives.

        Args:
            step: The step.
            action: The forward, of one of its batches.
            inputs: What it gets.
        """
        inputs = self._detached(step, action, inputs)
        with self._context(), self.statistics.ignored(action):
            values, found = self._run(step, action, inputs)
        results = (found[ref] for ref in step.units[action.batch].outputs_of(action))
        self._keep(step, action, inputs, (*values, *results), [])

    def drop_lookahead(self) -> None:
        """Forget what was computed ahead, also what is still under way."""
        self._drop()
        self.statistics.drop_ahead()

    # Handlers

    def _take_inputs(self, step: StepContext, action: Action) -> tuple[Tensors, bool]:
        """What the forward gets, and whether its memory came from the transport."""
        batch = step.index + action.batch
        received = self._received.pop((batch, base_of(action)), None)
        if received is not None:
            return received, True
        if step.units[action.batch].reads_known(action):
            return (), False
        producer = step.program.needs[action][0].producer
        if producer.op is Op.DATA:
            return (self._input_chunk(step, action),), False
        return self._activations.pop((batch, base_of(producer))), False

    def _forward(self, step: StepContext, action: Action) -> None:
        units = step.units[action.batch]
        taken, received = self._take_inputs(step, action)
        inputs = self._detached(step, action, taken)
        batch, grad = step.index + action.batch, has_backward(units, action)
        reading: AbstractContextManager[None] = nullcontext()
        if action.op is Op.TEACHER and action.batch and self.teacher is not None:
            reading = self.teacher.reading(step.index)
        elif grad and self.weights is not None:
            reading = self.weights.forward(batch, action.batch)
        with self._context(), reading, self.statistics.collecting(batch, action, units):
            values, found = self._run(step, action, inputs)
        self.statistics.ran(batch, action, units)
        self._store(step, action, values, found)
        recyclable = unshared(inputs, (*values, *found.values())) if received else []
        if grad:
            results = (*values, *(found[ref] for ref in units.outputs_of(action)))
            self._keep(step, action, inputs, results, recyclable)
        else:
            self._transport.recycle(recyclable)

    @staticmethod
    def _detached(step: StepContext, action: Action, taken: Tensors) -> Tensors:
        """What a forward gets, as the beginning of a graph."""
        units = step.units[action.batch]
        grad = has_backward(units, action)
        return tuple(
            tensor.detach().requires_grad_(grad and spec.requires_grad)
            for tensor, spec in zip(taken, units.input_specs(action), strict=True)
        )

    def _run(
        self, step: StepContext, action: Action, inputs: Tensors
    ) -> tuple[Tensors, dict[ValueRef, Tensor]]:
        """Run a stage; what it passes on, and what the loss reads."""
        units = step.units[action.batch]
        unit = units.of(action)
        first, last = units.span(action)
        name: NetworkName = NETWORK_OF[action.op]  # type: ignore[assignment]
        network, execution = self._networks[name], self._executions.get(name)
        network.about_to_run(step.index + action.batch, slice(unit.start, unit.start + unit.size))
        values, found = network.run(
            inputs, first, last, grad=has_backward(units, action),
            run=execution.run if execution is not None else None,
        )  # fmt: skip
        return () if last == unit.end else values, found

    def _keep(
        self,
        step: StepContext,
        action: Action,
        inputs: Tensors,
        results: Tensors,
        recyclable: list[Tensor],
    ) -> None:
        """Keep a forward's graph for its backward."""
        key = (step.index + action.batch, action.stage, action.unit or 0)
        ends = [result for result in results if result.requires_grad]
        self._saved[key] = Saved(inputs, ends, recyclable)

    def _store(
        self,
        step: StepContext,
        action: Action,
        passed_on: Tensors,
        found: dict[ValueRef, Tensor],
    ) -> None:
        batch = step.index + action.batch
        if passed_on:
            self._activations[batch, base_of(action)] = tuple(t.detach() for t in passed_on)
        if found:
            self._outputs[batch, base_of(action)] = {r: t.detach() for r, t in found.items()}

    def _grad_outputs(self, step: StepContext, action: Action) -> list[Tensor | None]:
        units = step.units[0]
        unit = units.of(action)
        base = backward_of(action)
        assert unit.shapes is not None
        _, last = units.span(action)
        passed = unit.shapes.boundaries[last] if last < unit.end else ()
        unused: list[Tensor | None] = [None for spec in passed if spec.requires_grad]
        following = self._gradients.pop((step.index, base, "next"), unused)
        return following + self._gradients.pop((step.index, base, "loss"), [])

    def _backward(self, step: StepContext, action: Action) -> None:
        saved = self._saved.pop((step.index, action.stage, action.unit or 0), None)
        if saved is None:
            return
        gradients = self._grad_outputs(step, action)
        pairs = [(r, g) for r, g in zip(saved.results, gradients, strict=True) if g is not None]
        if pairs:
            weights = self.weights
            with nullcontext() if weights is None else weights.backward(step.index):
                torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        self._pass_gradients(step, action, saved, [tensor.grad for tensor in saved.inputs])
        self._finish_backward(saved)

    def _input_backward(self, step: StepContext, action: Action) -> None:
        saved = self._saved.get((step.index, action.stage, action.unit or 0))
        if saved is None:
            return
        saved.split = SplitBackward(saved.results, saved.inputs)
        saved.results = []
        gradients = saved.split.input_half(self._grad_outputs(step, action))
        self._pass_gradients(step, action, saved, gradients)

    def _weight_backward(self, step: StepContext, action: Action) -> None:
        saved = self._saved.pop((step.index, action.stage, action.unit or 0), None)
        if saved is not None and saved.split is not None:
            saved.split.weight_half()
            self._finish_backward(saved)

    def _finish_backward(self, saved: Saved) -> None:
        saved.results = []
        self._transport.recycle(saved.recyclable)

    def _pass_gradients(
        self, step: StepContext, action: Action, saved: Saved, gradients: Sequence[Tensor | None]
    ) -> None:
        if action.stage == 0:
            return
        previous = Action(Op.BACKWARD, action.stage - 1, action.unit)
        self._gradients[step.index, previous, "next"] = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(saved.inputs, gradients, strict=True)
            if tensor.requires_grad
        ]
