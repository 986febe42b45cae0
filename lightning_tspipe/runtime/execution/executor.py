"""The executor: walks one rank's actions of a step, by one table of handlers.

::

    for action in schedule:  wait for what it needs ──► handlers[op] ──► send what it made

``RankStages`` has the handlers of stages, and the tensors in flight between them. What a stage
makes for another one, or a loss for a stage, lies under the same key whether both are on this rank
or a message brings it. Messages are those of the schedule.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import ValueRef
from lightning_tspipe.errors import TransportError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import Dependency
from lightning_tspipe.ir.schedule import Message, Schedule
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.captured import StepUnits
from lightning_tspipe.runtime.stages.stage import Stage, Versions
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import Channel, Edge, channel_of

Handler = Callable[[Any, Action], bool | None]
"""Runs an action of a step; False if that is not over yet, or was no work of its own."""


@dataclass
class StepContext:
    """What the executor needs to know about one step while it runs.

    Attributes:
        index: Number of the step.
        program: What all ranks do.
        units: Units of the batches worked on, by offset (0: this batch, 1: the next, ...).
        inputs: On the data rank, the call inputs of the same batches.
        result: What the step returns, on a rank that computes a loss.
    """

    index: int
    program: Schedule
    units: dict[int, StepUnits]
    inputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    result: Any = None

    def runs(self, action: Action) -> bool:
        """Whether there is anything to do in an action: a small batch leaves units empty."""
        return action.unit is None or self.units[action.batch].runs(action)


class Exchange(ABC):
    """What moves between ranks, before and after the actions of a step."""

    @abstractmethod
    def take(self, step: Any, action: Action) -> None:
        """Wait until what an action needs of other ranks is here."""

    @abstractmethod
    def send(self, step: Any, action: Action) -> None:
        """Send what an action has made to whoever waits for it."""


@dataclass(frozen=True)
class Executor:
    """Runs the actions of one rank.

    Attributes:
        handlers: What runs each op; ops that have none are left out.
        exchange: How actions get what others made.
        recorder: Notes when what ran.
        read: Of an action, the version of the weights that it has read and the updates predicted
            on top of it; empty where there is only one version.
    """

    handlers: Mapping[Op, Handler]
    exchange: Exchange
    recorder: Recorder
    read: Callable[[Action], tuple[int, int] | tuple[()]] = lambda _: ()

    def run(self, step: StepContext, actions: Iterable[Action]) -> None:
        """Run some of the step's actions, in order."""
        for action in actions:
            handler = self.handlers.get(action.op)
            if handler is None or not step.runs(action):
                continue
            self.exchange.take(step, action)
            started = time.perf_counter()
            if handler(step, action) is not False:
                self.recorder.ran(step.index, action, started, *self.read(action))
                self.exchange.send(step, action)


Key = tuple[int, Action, str]
"""Of tensors in flight: the batch, the action that makes or reads them, and what they are."""


class RankStages(Exchange):
    """The stages of one rank.

    Args:
        stages: The stages.
        transport: How to reach the other ranks.
        recorder: Notes how long this rank waits.

    Attributes:
        buffers: What is in flight between actions.
    """

    def __init__(self, stages: Iterable[Stage], transport: Transport, recorder: Recorder) -> None:
        self._stages = {(stage.op is Op.TEACHER, stage.index): stage for stage in stages}
        self._transport = transport
        self._recorder = recorder
        self._receipts: dict[Key, tuple[Receipt, Message]] = {}
        self.buffers: dict[Key, list[Any]] = {}
        self.handlers: dict[Op, Handler] = {
            Op.FORWARD: self._forward,
            Op.TEACHER: self._forward,
            Op.BACKWARD: self._backward,
            Op.INPUT_BACKWARD: self._backward,
            Op.WEIGHT_BACKWARD: self._weight_backward,
        }
        """What runs the actions of stages."""

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages.values())

    def of(self, action: Action) -> Stage:
        """The stage that runs an action."""
        return self._stages[action.op is Op.TEACHER, action.stage]

    def holds(self, action: Action) -> bool:
        """Whether the stage of an action is on this rank."""
        return (action.op is Op.TEACHER, action.stage) in self._stages

    def use_versions(self, op: Op, versions: Versions) -> None:
        """Have the stages of a network read versions of their weights."""
        for stage in self:
            if stage.op is op:
                stage.versions = versions

    # Forwards and backwards

    def _chunk(self, step: StepContext, action: Action) -> Tensor:
        """On the data rank: what the first stage of a network gets for a unit."""
        unit = step.units[action.batch].of(action)
        whole = step.inputs[action.batch][unit.call]
        return whole if unit.is_only else whole[unit.start : unit.start + unit.size]

    def _forward(self, step: StepContext, action: Action) -> None:
        batch, units = step.index + action.batch, step.units[action.batch]
        need = step.program.needs[action][0]
        if units.reads_known(action):
            received = []
        elif need.payload == "input" and step.inputs:
            received = [self._chunk(step, action)]
        else:
            received = self.buffers.pop(_key(batch, need))
        passed, outputs = self.of(action).forward(batch, action, units, tuple(received))
        for payload, made in (("activation", passed), ("output", outputs)):
            if made:
                self.buffers[batch, _base(action), payload] = list(made)

    def _backward(self, step: StepContext, action: Action) -> None:
        stage, place = self.of(action), (step.index, action.unit or 0)
        gradients: list[Tensor | None] = []
        for need in step.program.needs[action]:
            if need.payload == "gradient":
                is_of_loss = need.producer.op is Op.LOSS
                nothing = [] if is_of_loss else step.units[0].no_gradients(action)
                gradients += self.buffers.pop(_key(step.index, need), nothing)
        run = stage.backward if action.op is Op.BACKWARD else stage.input_backward
        passed_back = run(place, gradients)
        if passed_back and action.stage > 0:
            self.buffers[step.index, _base(action), "gradient"] = passed_back

    def _weight_backward(self, step: StepContext, action: Action) -> None:
        self.of(action).weight_backward((step.index, action.unit or 0))

    # Messages

    def post_receives(self, step: StepContext) -> None:
        """Ask for all messages of the step, so that no sender waits for this rank's turn."""
        for message in step.program.receives.get(self._transport.rank, ()):
            specs = step.units[message.producer.batch].payload(message)
            if specs:
                receipt = self._transport.receive(specs, message.source, channel_of(message))
                batch = step.index + message.consumer.batch
                self._receipts[_key(batch, message)] = receipt, message

    @override
    def take(self, step: StepContext, action: Action) -> None:
        for need in step.program.needs[action]:
            key = _key(step.index + action.batch, need)
            if key in self._receipts:
                self._receive(key)

    def _receive(self, key: Key) -> None:
        started = time.perf_counter()
        receipt, message = self._receipts.pop(key)
        try:
            self.buffers[key] = list(receipt.wait())
        except TransportError as error:
            reader, maker = message.consumer.in_words, message.producer.in_words
            raise TransportError(f"{reader} needs {maker} of batch {key[0]}: {error}") from error
        self._recorder.paused("receive", started)

    @override
    def send(self, step: StepContext, action: Action) -> None:
        messages = step.program.sends.get(action)
        if not messages:
            return
        started = time.perf_counter()
        keys = [_key(step.index + action.batch, message) for message in messages]
        for message, key in zip(messages, keys, strict=True):
            specs = step.units[action.batch].payload(message)
            if specs:
                is_input = message.payload == "input"
                made = [self._chunk(step, message.consumer)] if is_input else self.buffers[key]
                tensors = [tensor for tensor in made if tensor is not None]
                self._transport.send(tensors, message.target, channel_of(message), specs)
        is_read_here = self._transport.rank in step.program.pipeline.loss_ranks
        for key in keys:
            if key[2] != "output" or not is_read_here:
                self.buffers.pop(key, None)
        self._recorder.paused("send", started)

    def receive_ahead(self, batches: Iterable[int]) -> None:
        """Between two steps: wait for what others have sent of batches in flight."""
        for key in [key for key in self._receipts if key[0] in batches]:
            self._receive(key)

    def finish(self, index: int, *, in_training: bool = True) -> None:
        """A step is over: forget its batch, and wait until what was sent has left."""
        for stage in self:
            stage.forget(index)
        self.buffers = {key: found for key, found in self.buffers.items() if key[0] > index}
        started = time.perf_counter()
        with waiting(f"the end of batch {index}"):
            self._transport.finish_step(in_training=in_training)
        self._recorder.paused("send", started)

    def begin(self, batch: int) -> None:
        """The step of a batch begins: what ran ahead for it counts."""
        for stage in self:
            stage.statistics.commit_ahead(batch)

    def drop(self) -> None:
        """Forget all that is in flight; what is under way is waited for."""
        for receipt, _ in self._receipts.values():
            receipt.wait()
        self._receipts.clear()
        self.buffers.clear()
        for stage in self:
            stage.clear()

    # What losses read and give

    def value(self, batch: int, units: StepUnits, call: int, ref: ValueRef) -> Tensor:
        """One value of one call for the whole batch, detached."""
        parts = [
            self.buffers[batch, producer, "output"][units.outputs_of(producer).index(ref)]
            for producer in units.producers(call, ref)
        ]
        whole: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.detach()

    def put_value(
        self, batch: int, units: StepUnits, call: int, ref: ValueRef, whole: Tensor
    ) -> None:
        """As if a call of a batch had run and given this value."""
        start = 0
        for producer in units.producers(call, ref):
            specs, is_only = units.output_specs(producer), units.of(producer).is_only
            outputs = self.buffers.setdefault((batch, producer, "output"), [None] * len(specs))
            stop = start + (specs[ref].shape[0] if specs[ref].shape else 0)
            outputs[list(specs).index(ref)] = whole if is_only else whole[start:stop]
            start = stop


OF_LOSS = "gradient of the loss"


def _key(batch: int, need: Dependency | Message) -> Key:
    """Where the tensors lie that one action makes for another one."""
    if need.producer.op is Op.LOSS:
        return batch, _base(need.consumer), OF_LOSS
    # Of what the data rank gives, each reader gets something else.
    is_input = need.payload == "input"
    return batch, _base(need.consumer if is_input else need.producer), need.payload


@cache
def _base(action: Action) -> Action:
    """The action without its batch offset, and the whole backward of a half."""
    op = Op.BACKWARD if action.op is Op.INPUT_BACKWARD else action.op
    return Action(op, action.stage, action.unit)


class Pace:
    """Bounds how far a rank runs ahead of those that read what it makes: queues are bounded.

    Each rank tells of its steps, and waits for ranks that are too far behind.

    Args:
        transport: How to reach the other ranks.
        edges: Who makes something for whom.
        slack: Steps that a rank may be ahead.

    Attributes:
        slack: The same.
    """

    def __init__(self, transport: Transport, edges: Iterable[Edge], slack: int) -> None:
        own, pairs = transport.rank, {(edge.source, edge.target) for edge in edges}
        self._transport = transport
        self._before = sorted({a for a, b in pairs if b == own != a})
        self._owed = dict.fromkeys(sorted({b for a, b in pairs if a == own != b}), 0)
        self.slack = slack

    def tell(self) -> None:
        """This rank is at its next step: those that it reads of hear of it."""
        for rank in self._before:
            self._transport.send_object(None, rank, Channel.PACE)
        for rank in self._owed:
            self._owed[rank] += 1

    def wait(self, slack: int | None = None) -> None:
        """Wait for ranks that are more than so many steps behind this one.

        Args:
            slack: The number, if not the usual one.
        """
        most = self.slack if slack is None else slack
        for rank, owed in self._owed.items():
            for _ in range(owed - most):
                with waiting(f"rank {rank}, which is {owed} batches behind"):
                    self._transport.receive_object(rank, Channel.PACE)
                self._owed[rank] -= 1
