"""The executor: walks one rank's actions of a step, by one table of handlers.

::

    for action in schedule:  wait for what it needs ──► handlers[op] ──► send what it made

``RankStages`` has the handlers of stages, and the tensors in flight between them; ``Losses`` has
those of losses. What a stage makes for another one, or a loss for a stage, lies under the same key
whether both are on this rank or a message brings it. Messages are those of the schedule.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import Inputs, Specs, StepPlan, ValueRef
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError, TransportError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.dependencies import OF_LOSS, batchless
from lightning_tspipe.ir.schedule import Message, Schedule
from lightning_tspipe.networks.guards import one_moment
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.replay.purity import Fingerprints, fingerprints
from lightning_tspipe.replay.runner import StepRunner
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
        replay: On such a rank, the step that its loss runs once more, what gives its batch when the
            outputs are here, the seed of its random stream, and what the call inputs that went into
            the pipeline are like, if they are compared.
        prologue: On the data rank, makes the call inputs once more, of the teacher's ``outputs``.
        result: What the step returns, on a rank that computes a loss.
    """

    index: int
    program: Schedule
    units: dict[int, StepUnits]
    inputs: dict[int, Inputs] = field(default_factory=dict)
    replay: tuple[Step, Callable[[], Any], int, Fingerprints] | None = None
    prologue: Callable[..., Inputs] | None = None
    result: Any = None

    def runs(self, action: Action) -> bool:
        """Whether there is anything to do in an action: a small batch leaves units empty."""
        return action.unit is None or self.units[action.batch].runs(action)


class Executor(ABC):
    """Runs the actions of one rank; what moves between ranks before and after is its heirs'.

    Args:
        transport: How to reach the other ranks.
        recorder: Notes when what ran, and how long this rank waits.

    Attributes:
        transport: The same.
        recorder: The same.
        handlers: What runs each op; ops that have none are left out.
        read: Of an action, the version of the weights that it has read and the updates predicted
            on top of it; empty where there is only one version.
    """

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self.transport = transport
        self.recorder = recorder
        self.handlers: dict[Op, Handler] = {Op.DATA: self._data}
        self.read: Callable[[Action], tuple[int, int] | tuple[()]] = lambda _: ()

    @abstractmethod
    def take(self, step: Any, action: Action) -> None:
        """Wait until what an action needs of other ranks is here."""

    @abstractmethod
    def send(self, step: Any, action: Action) -> None:
        """Send what an action has made to whoever waits for it."""

    def run(self, step: Any, actions: Iterable[Action]) -> None:
        """Run some of the step's actions, in order."""
        for action in actions:
            handler = self.handlers.get(action.op)
            if handler is None or not step.runs(action):
                continue
            self.take(step, action)
            started = time.perf_counter()
            if handler(step, action) is not False:
                if self.recorder.is_on:
                    self.recorder.ran(step.index, action, started, *self.read(action))
                self.send(step, action)

    def _data(self, step: Any, action: Action) -> bool:
        """Hand a batch to the first stages; it was read, and noted, when it was told of."""
        self.send(step, action)
        return False


Key = tuple[int, Action, str]
"""Of tensors in flight: the batch, the action that makes or reads them, and what they are."""


class RankStages(Executor):
    """Runs the actions of one rank's stages, and of whoever registers more handlers.

    Args:
        stages: The stages.
        transport: How to reach the other ranks.
        recorder: Notes when what ran, and how long this rank waits.

    Attributes:
        buffers: What is in flight between actions.
    """

    def __init__(self, stages: Iterable[Stage], transport: Transport, recorder: Recorder) -> None:
        super().__init__(transport, recorder)
        self._stages = {(stage.op is Op.TEACHER, stage.index): stage for stage in stages}
        self._receipts: dict[Key, tuple[Receipt, Message, Specs]] = {}
        self.buffers: dict[Key, list[Any]] = {}
        self.handlers |= dict.fromkeys((Op.FORWARD, Op.TEACHER), self._forward)
        self.handlers |= dict.fromkeys((Op.BACKWARD, Op.INPUT_BACKWARD), self._backward)
        self.handlers[Op.WEIGHT_BACKWARD] = self._weight_backward

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

    @override
    def run(self, step: Any, actions: Iterable[Action]) -> None:
        with one_moment() as begin_another:
            for action in actions:
                super().run(step, (action,))
                if action.op.is_rank_wide:  # the user's step has run
                    begin_another()

    # Forwards and backwards

    def _chunk(self, step: StepContext, action: Action) -> list[Tensor]:
        """On the data rank: what the first stage of a network gets for a unit."""
        unit = step.units[action.batch].of(action)
        whole = step.inputs[action.batch][unit.call]
        rows = slice(None) if unit.is_only else slice(unit.start, unit.start + unit.size)
        return [tensor[rows] for tensor in whole]

    def _forward(self, step: StepContext, action: Action) -> None:
        batch, units = step.index + action.batch, step.units[action.batch]
        need = step.program.needs[action][0]
        if units.reads_known(action):
            received = []
        elif need.payload == "input" and step.inputs:
            received = self._chunk(step, action)
        else:
            received = self.buffers.pop((batch, *need.place))
        passed, outputs = self.of(action).forward(batch, action, units, tuple(received))
        for payload, made in (("activation", passed), ("output", outputs)):
            if made:
                self.buffers[batch, batchless(action), payload] = list(made)

    def _backward(self, step: StepContext, action: Action) -> None:
        stage, batch = self.of(action), step.index + action.batch
        gradients: list[Tensor | None] = []
        for need in step.program.needs[action]:
            if need.payload == "gradient":
                is_of_loss = need.producer.op is Op.LOSS
                nothing = [] if is_of_loss else step.units[action.batch].no_gradients(action)
                gradients += self.buffers.pop((batch, *need.place), nothing)
        run = stage.backward if action.op is Op.BACKWARD else stage.input_backward
        passed_back = run((batch, action.unit or 0), gradients)
        if passed_back and action.stage > 0:
            self.buffers[batch, batchless(action), "gradient"] = passed_back

    def _weight_backward(self, step: StepContext, action: Action) -> None:
        self.of(action).weight_backward((step.index + action.batch, action.unit or 0))

    # Messages

    def post_receives(self, step: StepContext) -> None:
        """Ask for all messages of the step, so that no sender waits for this rank's turn."""
        for message in step.program.receives.get(self.transport.rank, ()):
            specs = step.units[message.producer.batch].payload(message)
            if specs:
                receipt = self.transport.receive(specs, message.source, channel_of(message))
                batch = step.index + message.consumer.batch
                self._receipts[batch, *message.place] = receipt, message, specs

    @override
    def take(self, step: StepContext, action: Action) -> None:
        for need in step.program.needs[action]:
            key = (step.index + action.batch, *need.place)
            if key in self._receipts:
                self._receive(key)

    def _receive(self, key: Key) -> None:
        started = time.perf_counter()
        receipt, message, specs = self._receipts.pop(key)
        try:
            tensors = receipt.wait()
            if message.payload == "gradient":
                kind = channel_of(message), specs
                tensors = self.transport.orders.hear(tensors, message.source, kind)
            self.buffers[key] = list(tensors)
        except TransportError as error:
            reader, maker = message.consumer.in_words, message.producer.in_words
            raise TransportError(f"{reader} needs {maker} of batch {key[0]}: {error}") from error
        self.recorder.paused("receive", started)

    @override
    def send(self, step: StepContext, action: Action) -> None:
        messages = step.program.sends.get(action)
        if not messages:
            return
        started = time.perf_counter()
        keys = [(step.index + action.batch, *message.place) for message in messages]
        for message, key in zip(messages, keys, strict=True):
            specs = step.units[action.batch].payload(message)
            if specs:
                is_input = message.payload == "input"
                made = self._chunk(step, message.consumer) if is_input else self.buffers[key]
                tensors = [tensor for tensor in made if tensor is not None]
                channel = channel_of(message)
                if message.payload == "gradient":
                    kind = channel, specs
                    tensors = self.transport.orders.tell(tensors, message.target, kind)
                self.transport.send(tensors, message.target, channel, specs)
        is_read_here = self.transport.rank in step.program.pipeline.readers(action.op)
        for key in keys:
            if key[2] != "output" or not is_read_here:
                self.buffers.pop(key, None)
        self.recorder.paused("send", started)

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
            self.transport.finish_step(in_training=in_training)
        self.recorder.paused("send", started)

    def drop(self) -> None:
        """Forget all that is in flight; what is under way is waited for."""
        for receipt, *_ in self._receipts.values():
            receipt.wait()
        self._receipts.clear()
        self.buffers.clear()
        for stage in self:
            stage.clear()

    # What losses read and give

    def value(self, batch: int, units: StepUnits, call: int, ref: ValueRef) -> Tensor:
        """One value of one call for the whole batch, detached."""
        parts = [
            self.buffers[batch, producer, "output"][list(units.outputs(producer)).index(ref)]
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
            specs, is_only = units.outputs(producer), units.of(producer).is_only
            outputs = self.buffers.setdefault((batch, producer, "output"), [None] * len(specs))
            stop = start + (specs[ref].shape[0] if specs[ref].shape else 0)
            outputs[list(specs).index(ref)] = whole if is_only else whole[start:stop]
            start = stop


Value = tuple[int, ValueRef]
"""A call, and a value of it."""


@dataclass(eq=False)
class Losses:
    """Runs the losses of a rank: the step once more, with the networks' real outputs.

    The step's caller runs the backward of what it returns, so that a loss is run in two halves::

        run 1st time    outputs ──► the step (replay) ──► what it returns
        run 2nd time    its backward ──► gradients of the outputs, cut into micro-batches

    Attributes:
        plan: The captured step.
        runner: Runs it.
        stages: Hold what the networks give.
        device: Where this rank computes.
        handlers: What of a rank's actions runs them, in its training mode.
        leaves: What the step's calls gave so far, where gradients are wanted.
        given: The networks' values in this step, if they are not those that were computed.
        reached: Those that have gradients, once the backward of the loss has run.
    """

    plan: StepPlan
    runner: StepRunner
    stages: RankStages
    device: torch.device
    handlers: dict[Op, Handler] = field(default_factory=dict)
    leaves: dict[Value, Tensor] = field(default_factory=dict)
    given: Mapping[Value, Tensor] = field(default_factory=dict)
    reached: frozenset[Value] = frozenset()
    _context: StepContext | None = None
    _started: tuple[Action, float] | None = None
    _run_backward: Callable[[], None] | None = None

    def prepare_backward(self, run_backward: Callable[[], None]) -> None:
        """The caller is about to have the backward run, in the middle of the replay at times."""
        self._run_backward = run_backward
        self._note()

    def run(self, context: StepContext, action: Action) -> bool:
        """Run the half of a loss whose turn it is; whether it is over."""
        if self._run_backward is None:
            self._replay(context, action)
            return False
        run, self._run_backward = self._run_backward, None
        run()
        for call in self.plan.calls_of("student"):
            self._scatter_gradients(context.index, context.units[0], call)
        gradients = {value: leaf.grad for value, leaf in self.leaves.items()}
        self.reached = frozenset(v for v, gradient in gradients.items() if gradient is not None)
        self.leaves = {}
        return True

    def make_inputs(self, context: StepContext, _: Action) -> None:
        """Make what the networks get once more, now that it can be made of the teacher's outputs.

        Raises:
            CaptureError: It has other shapes than those that all ranks were told of.
        """
        assert context.prologue is not None
        assert context.replay is not None
        units, transport = context.units[0], self.stages.transport
        made = context.prologue(outputs=partial(self.stages.value, context.index, units))
        pairs = zip(chain(*made), chain(*units.inputs), strict=True)
        calls = (call for call, tensors in enumerate(made) for _ in tensors)
        for call, (one, spec) in zip(calls, pairs, strict=True):
            if (one.shape, one.dtype) != (spec.shape, spec.dtype):
                raise CaptureError(
                    f"call {call} of the step gets {one.dtype} of shape {tuple(one.shape)}, and "
                    f"{spec.dtype} of shape {spec.shape} without the values of the teacher's "
                    f"output that it is made of, at {self.plan.fed_at}. Shapes must not depend on "
                    "values: keep all samples, and weight them in the loss; or name the trained "
                    "networks only, TSPipeStrategy(student=[...]): what is frozen then runs first"
                )
        context.inputs[0] = made
        step, batch_of, seed, compared = context.replay
        if compared:
            prints = fingerprints(made)
            context.replay = step, batch_of, seed, prints
            for rank in {*context.program.pipeline.loss_ranks} - {transport.rank}:
                transport.send_object(prints, rank, Channel.PRINTS)

    def _replay(self, context: StepContext, action: Action) -> None:
        assert context.replay is not None
        step, batch_of, seed, prints = context.replay
        data_rank, transport = context.program.pipeline.data_rank, self.stages.transport
        if prints and self.plan.fed_at and transport.rank != data_rank:
            prints = transport.receive_object(data_rank, Channel.PRINTS)
        self.leaves, self._context = {}, context
        batch = batch_of()
        self._started = action, time.perf_counter()
        context.result = self.runner.replay(step, batch, seed, self._output, prints)
        self._note()

    def _note(self) -> None:
        """The loss is there."""
        if self._started is not None and self._context is not None:
            self.stages.recorder.ran(self._context.index, *self._started)
        self._started = None

    def done(self) -> None:
        """The step is over: a replay that goes on can't call networks any more."""
        self._context = None
        self.given = {}

    def _output(self, call: int, ref: ValueRef) -> Tensor:
        context = self._context
        if context is None:
            raise CaptureError(
                f"the step calls a pipelined network at {current_line()}, after an optimizer used "
                "the gradients of earlier calls: a batch goes through the pipeline once, forward "
                "and backward. Make all calls before the first optimizer.step, or update one "
                "network per batch, as in `if batch_idx % 2 == 0: opt_a.step()`"
            )
        if self.given:
            return self.given[call, ref]
        tensor = self.stages.value(context.index, context.units[0], call, ref)
        units = context.units[0].units[self.plan.calls[call].network]
        spec = next(u.shapes.outputs[ref] for u in units if u.call == call and u.shapes is not None)
        if spec.requires_grad and torch.is_grad_enabled():
            tensor.requires_grad_()
            self.leaves[call, ref] = tensor
        return tensor

    def _scatter_gradients(self, batch: int, units: StepUnits, call: int) -> None:
        """Cut the gradients of a call's outputs into micro-batches."""
        starts: dict[ValueRef, int] = {}
        for action, specs in units.loss_gradients(call):
            is_only = units.of(action).is_only
            parts: list[Tensor | None] = []
            for ref, spec in specs.items():
                leaf, start = self.leaves.get((call, ref)), starts.get(ref, 0)
                stop = starts[ref] = start + (spec.shape[0] if spec.shape else 0)
                if leaf is not None and leaf.grad is not None:
                    parts.append(leaf.grad if is_only else leaf.grad[start:stop])
                elif self.stages.holds(action):
                    parts.append(None)
                else:
                    # Another rank waits for as many tensors as planned.
                    parts.append(torch.zeros(spec.shape, dtype=spec.dtype, device=self.device))
            self.stages.buffers[batch, action, OF_LOSS] = parts


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
