"""The executor: walks one rank's actions of a step; one handler per op.

Everything that an action reads is in one of four places, keyed by (step, action): ``inputs`` (call
inputs on the data rank), ``activations`` (between stages of one rank), ``outputs`` (for the loss)
and ``gradients``. What another rank made is there because its receipt was waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import NetworkName, ValueRef
from lightning_tspipe.errors import TransportError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import Message
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.split_backward import SplitBackward
from lightning_tspipe.runtime.execution import Execution
from lightning_tspipe.runtime.failures import waiting
from lightning_tspipe.runtime.network import ChainNetwork
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stage_weights import StageWeights
from lightning_tspipe.runtime.statistics import CallStatistics
from lightning_tspipe.runtime.step import (
    Key,
    Saved,
    StepContext,
    UnderWay,
    backward_of,
    base_of,
    channel_of,
    has_backward,
    offset_of,
    receipt_key,
    unshared,
)
from lightning_tspipe.runtime.teacher_prediction import TeacherPrediction
from lightning_tspipe.runtime.transport import Receipt, Transport
from lightning_tspipe.runtime.units import NETWORK_OF, StepUnits


class Executor:
    """Runs the actions of one rank.

    Args:
        transport: How to reach the other ranks.
        networks: The networks; the rank's own stages hold real parameters.
        statistics: Deferred BatchNorm statistics of each network.
        forward_context: The precision plugin's forward context.
        device: Where this rank computes.
        executions: How the atoms of networks run, if not as they are.

    Attributes:
        recorder: Notes when what ran.
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
        executions: Mapping[NetworkName, Execution] | None = None,
    ) -> None:
        self._device = device
        self._executions = executions or {}
        self._transport = transport
        self._rank = transport.rank
        self._networks = networks
        self.statistics = CallStatistics(statistics)
        self._context = forward_context
        self._activations: dict[Key, Tensors] = {}
        self._received: dict[Key, Tensors] = {}
        self._outputs: dict[Key, dict[ValueRef, Tensor]] = {}
        self._gradients: dict[tuple[int, Action, str], list[Tensor | None]] = {}
        self._saved: dict[tuple[int, int, int], Saved] = {}
        self._receipts: dict[tuple[int, Action, Action], Receipt] = {}
        self.recorder = Recorder()
        self.weights: StageWeights | None = None
        self.teacher: TeacherPrediction | None = None
        self._handlers: dict[Op, Callable[[StepContext, Action], None]] = {
            Op.FORWARD: self._forward,
            Op.TEACHER: self._forward,
            Op.BACKWARD: self._backward,
            Op.INPUT_BACKWARD: self._input_backward,
            Op.WEIGHT_BACKWARD: self._weight_backward,
        }

    def post_receives(self, step: StepContext) -> None:
        """Ask for all messages of the step, so that no sender waits for this rank's turn."""
        for message in step.program.receives.get(self._rank, ()):
            if message.payload == "batch":
                continue
            specs = step.units[offset_of(message)].payload(message)
            if specs:
                receipt = self._transport.receive(specs, message.source, channel_of(message))
                batch = step.index + message.consumer.batch
                self._receipts[receipt_key(batch, message)] = receipt

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

    def send_inputs(self, step: StepContext, offset: int) -> None:
        """On the data rank: hand the call inputs to the first stages."""
        started = time.perf_counter()
        for message in step.program.sends.get(Action(Op.DATA, self._rank, batch=offset), ()):
            if message.payload == "input" and step.units[offset].payload(message):
                chunk = self._input_chunk(step, message.consumer)
                self._transport.send([chunk], message.target, channel_of(message))
        self.recorder.paused("send", started)

    def send(self, step: StepContext, producer: Action) -> None:
        """Send what an action made to whoever waits for it."""
        messages = step.program.sends.get(producer)
        if not messages:
            return
        started = time.perf_counter()
        for message in messages:
            specs = step.units[offset_of(message)].payload(message)
            if specs:
                tensors = self._payload(step, message)
                self._transport.send(tensors, message.target, channel_of(message))
        self._forget_sent(step, producer)
        self.recorder.paused("send", started)

    def _payload(self, step: StepContext, message: Message) -> list[Tensor]:
        key = (step.index + message.producer.batch, base_of(message.producer))
        if message.payload == "activation":
            return list(self._activations[key])
        if message.payload == "output":
            found = self._outputs[key]
            refs = step.units[message.producer.batch].outputs_of(message.producer)
            return [found[ref] for ref in refs]
        kind = "loss" if message.producer.op is Op.LOSS else "next"
        tensors = self._gradients[step.index, backward_of(message.consumer), kind]
        return [tensor for tensor in tensors if tensor is not None]

    def _forget_sent(self, step: StepContext, producer: Action) -> None:
        key = (step.index + producer.batch, base_of(producer))
        targets = {message.payload for message in step.program.sends[producer]}
        if "activation" in targets:
            self._activations.pop(key, None)
        if "output" in targets and step.program.schedule.pipeline.is_chain:
            self._outputs.pop(key, None)  # else this rank's heads may read them too
        if "gradient" in targets and producer.op is not Op.LOSS:
            previous = Action(Op.BACKWARD, producer.stage - 1, producer.unit)
            self._gradients.pop((step.index, previous, "next"), None)

    def _await(self, step: StepContext, action: Action) -> None:
        batch = step.index + action.batch
        for need in step.program.needs[action]:
            receipt = self._receipts.pop((batch, base_of(need.producer), base_of(action)), None)
            if receipt is None:
                continue
            tensors = self._wait(receipt, batch, need.producer, action)
            if need.payload in {"input", "activation"}:
                self._received[batch, base_of(action)] = tuple(tensors)
            else:
                kind = "loss" if need.producer.op is Op.LOSS else "next"
                self._gradients[step.index, backward_of(action), kind] = list(tensors)

    def _wait(
        self, receipt: Receipt, batch: int, producer: Action, consumer: Action
    ) -> list[Tensor]:
        started = time.perf_counter()
        try:
            tensors = receipt.wait()
        except TransportError as error:
            raise TransportError(
                f"{consumer.in_words} needs {producer.in_words} of batch {batch}: {error}"
            ) from error
        self.recorder.paused("receive", started)
        return tensors

    def await_outputs(self, step: StepContext, loss: Action) -> None:
        """On the loss rank: wait for all outputs of the step's batch."""
        for need in step.program.needs[loss]:
            key = (step.index, base_of(need.producer), base_of(loss))
            receipt = self._receipts.pop(key, None)
            if receipt is not None:
                refs = step.units[0].outputs_of(need.producer)
                received = self._wait(receipt, step.index, need.producer, loss)
                self._outputs[step.index, base_of(need.producer)] = dict(
                    zip(refs, received, strict=True)
                )

    def output(self, step: StepContext, call: int, ref: ValueRef) -> Tensor:
        """On the loss rank: one value of one call for the whole batch, detached."""
        return self._whole(step.index, step.units[0], call, ref)

    def _whole(self, batch: int, units: StepUnits, call: int, ref: ValueRef) -> Tensor:
        parts = [self._outputs[batch, producer][ref] for producer in units.producers(call, ref)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.detach()

    def outputs_ahead(
        self, batch: int, units: StepUnits, values: Sequence[tuple[int, ValueRef]]
    ) -> dict[tuple[int, ValueRef], Tensor]:
        """Between two steps: values of calls that ran ahead, for their whole batch."""
        pending = [key for key in self._receipts if key[0] == batch and key[2].op is Op.LOSS]
        for key in pending:
            producer = key[1]
            received = self._wait(self._receipts.pop(key), *key)
            refs = units.outputs_of(producer)
            self._outputs[batch, producer] = dict(zip(refs, received, strict=True))
        return {(call, ref): self._whole(batch, units, call, ref) for call, ref in values}

    def put_ahead(
        self, batch: int, units: StepUnits, outputs: dict[tuple[int, ValueRef], Tensor]
    ) -> None:
        """As if the calls of a batch had run ahead and given these values."""
        for (call, ref), whole in outputs.items():
            start = 0
            for producer in units.producers(call, ref):
                shapes = units.of(producer).shapes
                assert shapes is not None
                spec = shapes.outputs[ref]
                stop = start + spec.shape[0] if spec.shape else start
                part = whole if units.of(producer).is_only else whole[start:stop]
                found = self._outputs.setdefault((batch, producer), {})
                found[ref] = part.to(self._device)
                start = stop

    def scatter_gradient(
        self, step: StepContext, call: int, gradients: dict[ValueRef, Tensor | None]
    ) -> None:
        """On the loss rank: cut the gradients of a call's outputs into micro-batches."""
        ranks = step.program.schedule.pipeline.student.ranks
        offsets = dict.fromkeys(gradients, 0)
        for action, unit, refs in step.units[0].loss_gradients(call):
            assert unit.shapes is not None
            parts: list[Tensor | None] = []
            for ref in refs:
                spec = unit.shapes.outputs[ref]
                start, whole = offsets.get(ref, 0), gradients.get(ref)
                stop = offsets[ref] = start + (spec.shape[0] if spec.shape else 0)
                if whole is not None:
                    parts.append(whole if unit.is_only else whole[start:stop])
                elif ranks[action.stage] == self._rank:
                    parts.append(None)
                else:
                    # Another rank waits for as many tensors as planned.
                    parts.append(torch.zeros(spec.shape, dtype=spec.dtype, device=self._device))
            self._gradients[step.index, action, "loss"] = parts

    def finish(self, step: StepContext) -> None:
        """The step is over: forget what belongs to it."""
        for store in (self._activations, self._received, self._outputs):
            for key in [key for key in store if key[0] <= step.index]:
                store.pop(key)
        for gradient in [key for key in self._gradients if key[0] <= step.index]:
            del self._gradients[gradient]
        for saved in [key for key in self._saved if key[0] <= step.index]:
            del self._saved[saved]
        self.statistics.finish(step.index)
        if self.weights is not None:
            self.weights.trained(step.index)
        started = time.perf_counter()
        with waiting(f"the end of batch {step.index}"):
            self._transport.finish_step()
        self.recorder.paused("send", started)

    def under_way(self, units: Mapping[int, StepUnits]) -> UnderWay:
        """Between two steps: what there is of batches that work has begun on.

        What other ranks have sent of them is waited for.

        Args:
            units: Of these batches, by their numbers.
        """
        for key in list(self._receipts):
            batch, producer, consumer = key
            tensors = self._wait(self._receipts.pop(key), *key)
            if consumer.op is Op.LOSS:
                refs = units[batch].outputs_of(producer)
                self._outputs[batch, producer] = dict(zip(refs, tensors, strict=True))
            else:
                self._received[batch, consumer] = tuple(tensors)
        inputs = {key: saved.inputs for key, saved in self._saved.items()}
        return UnderWay(self._received, self._outputs, inputs)

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
        for receipt in self._receipts.values():
            receipt.wait()
        self._receipts.clear()
        for store in (self._activations, self._received, self._outputs, self._saved):
            store.clear()
        self.statistics.drop_ahead()

    # Handlers

    def _input_chunk(self, step: StepContext, action: Action) -> Tensor:
        unit = step.units[action.batch].of(action)
        whole = step.inputs[action.batch][unit.call]
        if unit.is_only:
            return whole
        return whole[unit.start : unit.start + unit.size]

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
