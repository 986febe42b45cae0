"""What one rank holds of the batches under way, and what of it ranks send to each other.

Everything that an action reads is in one of four places, keyed by (step, action): ``inputs`` (call
inputs on the data rank), ``activations`` (between stages of one rank), ``outputs`` (for the loss)
and ``gradients``. What another rank made is there because its receipt was waited for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import ValueRef
from lightning_tspipe.errors import TransportError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import Message
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.runtime.execution.context import (
    Key,
    Saved,
    StepContext,
    UnderWay,
    backward_of,
    base_of,
    offset_of,
    receipt_key,
)
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.units import StepUnits
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import channel_of


class Exchange:
    """What a rank holds, sends and receives; the executor runs what makes it.

    Args:
        transport: How to reach the other ranks.
        device: Where this rank computes.

    Attributes:
        recorder: Notes when what ran.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.recorder = Recorder()
        self._device = device
        self._transport = transport
        self._rank = transport.rank
        self._activations: dict[Key, Tensors] = {}
        self._received: dict[Key, Tensors] = {}
        self._outputs: dict[Key, dict[ValueRef, Tensor]] = {}
        self._gradients: dict[tuple[int, Action, str], list[Tensor | None]] = {}
        self._saved: dict[tuple[int, int, int], Saved] = {}
        self._receipts: dict[tuple[int, Action, Action], Receipt] = {}

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

    def send_inputs(self, step: StepContext, offset: int) -> None:
        """On the data rank: hand the call inputs to the first stages."""
        started = time.perf_counter()
        for message in step.program.sends.get(Action(Op.DATA, self._rank, batch=offset), ()):
            if message.payload != "input":
                continue
            specs = step.units[offset].payload(message)
            if specs:
                chunk = self._input_chunk(step, message.consumer)
                self._transport.send([chunk], message.target, channel_of(message), specs)
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
                self._transport.send(tensors, message.target, channel_of(message), specs)
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

    def _input_chunk(self, step: StepContext, action: Action) -> Tensor:
        unit = step.units[action.batch].of(action)
        whole = step.inputs[action.batch][unit.call]
        if unit.is_only:
            return whole
        return whole[unit.start : unit.start + unit.size]

    def _forget(self, index: int) -> None:
        """Keep nothing of a step that is over, nor of those before it."""
        for store in (self._activations, self._received, self._outputs):
            for key in [key for key in store if key[0] <= index]:
                store.pop(key)
        for gradient in [key for key in self._gradients if key[0] <= index]:
            del self._gradients[gradient]
        for saved in [key for key in self._saved if key[0] <= index]:
            del self._saved[saved]

    def _finish_sends(self, index: int, *, in_training: bool) -> None:
        """Wait until what was sent before has left."""
        started = time.perf_counter()
        with waiting(f"the end of batch {index}"):
            self._transport.finish_step(in_training=in_training)
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

    def _drop(self) -> None:
        """Forget all, also what is still under way."""
        for receipt in self._receipts.values():
            receipt.wait()
        self._receipts.clear()
        for store in (self._activations, self._received, self._outputs, self._saved):
            store.clear()
