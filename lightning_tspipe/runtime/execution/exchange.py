"""Messages between the stages of different ranks.

Messages are those of the lowered program. What another rank made is in the boxes of the stage that
reads it, or among the outputs for the loss, because its receipt was waited for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.errors import TransportError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import Message
from lightning_tspipe.runtime.execution.context import StepContext, backward_of, base_of
from lightning_tspipe.runtime.execution.executor import Exchange
from lightning_tspipe.runtime.execution.rank_stages import RankStages
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.units import StepUnits
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import channel_of


class StageExchange(Exchange):
    """Moves activations, outputs and gradients between the stages of all ranks.

    Args:
        transport: How to reach the other ranks.
        stages: Of this rank.
        recorder: Notes how long this rank waits.
    """

    def __init__(self, transport: Transport, stages: RankStages, recorder: Recorder) -> None:
        self._transport = transport
        self._stages = stages
        self._outputs = stages.outputs
        self._recorder = recorder
        self._receipts: dict[tuple[int, Action, Action], tuple[Receipt, str]] = {}

    def post_receives(self, step: StepContext) -> None:
        """Ask for all messages of the step, so that no sender waits for this rank's turn."""
        for message in step.program.receives.get(self._transport.rank, ()):
            if message.payload == "batch":
                continue
            specs = step.units[message.producer.batch].payload(message)
            if specs:
                receipt = self._transport.receive(specs, message.source, channel_of(message))
                batch = step.index + message.consumer.batch
                key = batch, base_of(message.producer), base_of(message.consumer)
                self._receipts[key] = receipt, message.payload

    @override
    def take(self, step: StepContext, action: Action) -> None:
        batch = step.index + action.batch
        for need in step.program.needs[action]:
            key = batch, base_of(need.producer), base_of(action)
            if key in self._receipts:
                self._receive(key, step.units[action.batch])

    def _receive(self, key: tuple[int, Action, Action], units: StepUnits) -> None:
        """Wait for a message, and put it where it is read."""
        started = time.perf_counter()
        batch, producer, consumer = key
        receipt, payload = self._receipts.pop(key)
        try:
            tensors = receipt.wait()
        except TransportError as error:
            raise TransportError(
                f"{consumer.in_words} needs {producer.in_words} of batch {batch}: {error}"
            ) from error
        self._recorder.paused("receive", started)
        if payload == "output":
            self._outputs.put(batch, units, producer, tensors)
        elif payload != "gradient":
            self._stages.of(consumer).received[batch, consumer.unit or 0] = tuple(tensors)
        elif producer.op is Op.LOSS:
            self._outputs.gradients[batch, backward_of(consumer)] = list(tensors)
        else:
            self._stages.of(consumer).gradients[batch, consumer.unit or 0] = list(tensors)

    @override
    def send(self, step: StepContext, action: Action) -> None:
        messages = step.program.sends.get(action)
        if not messages:
            return
        started = time.perf_counter()
        for message in messages:
            specs = step.units[action.batch].payload(message) if _travels(message) else ()
            if specs:
                tensors = self._payload(step, message)
                self._transport.send(tensors, message.target, channel_of(message), specs)
        self._forget_sent(step, action)
        self._recorder.paused("send", started)

    def _payload(self, step: StepContext, message: Message) -> list[Tensor]:
        producer = message.producer
        batch, unit = step.index + producer.batch, producer.unit or 0
        if message.payload == "input":
            return [self._stages.input_chunk(step, message.consumer)]
        if message.payload == "activation":
            return list(self._stages.of(producer).passed_on[batch, unit])
        if message.payload == "output":
            found = self._outputs.values[batch, base_of(producer)]
            refs = step.units[producer.batch].outputs_of(producer)
            return [found[ref] for ref in refs]
        if producer.op is Op.LOSS:
            tensors = self._outputs.gradients[batch, backward_of(message.consumer)]
        else:
            tensors = self._stages.of(producer).passed_back[batch, unit]
        return [tensor for tensor in tensors if tensor is not None]

    def _forget_sent(self, step: StepContext, producer: Action) -> None:
        if producer.unit is None:
            return
        batch, stage = step.index + producer.batch, self._stages.of(producer)
        payloads = {message.payload for message in step.program.sends[producer]}
        if "activation" in payloads:
            stage.passed_on.pop((batch, producer.unit), None)
        is_read = self._transport.rank in step.program.schedule.pipeline.loss_ranks
        if "output" in payloads and not is_read:
            self._outputs.values.pop((batch, base_of(producer)), None)
        if "gradient" in payloads:
            stage.passed_back.pop((batch, producer.unit), None)

    def receive_ahead(self, units: Mapping[int, StepUnits], *, for_loss: bool = False) -> None:
        """Between two steps: wait for what others have sent of batches in flight.

        Args:
            units: Of these batches, by their numbers.
            for_loss: Only for what the loss reads.
        """
        for key in list(self._receipts):
            batch, _, consumer = key
            if batch in units and (consumer.op is Op.LOSS or not for_loss):
                self._receive(key, units[batch])

    def finish(self, index: int, *, in_training: bool = True) -> None:
        """Wait until what was sent in a step has left."""
        started = time.perf_counter()
        with waiting(f"the end of batch {index}"):
            self._transport.finish_step(in_training=in_training)
        self._recorder.paused("send", started)

    def drop(self) -> None:
        """Wait for all that is under way, and leave it."""
        for receipt, _ in self._receipts.values():
            receipt.wait()
        self._receipts.clear()


def _travels(message: Message) -> bool:
    """Whether it is a message of tensors between stages; fields of the batch go by themselves."""
    return message.payload != "batch"
