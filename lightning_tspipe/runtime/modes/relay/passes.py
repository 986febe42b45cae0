"""One rank's part of a pass: get a share of what the stage before computed, relay, train.

::

    receive a ──► T of the stage's blocks ──► send on ──► F, loss, B of each block
                     a0 ──► a1 ──► a2                       S0(a0) ~ a1, S1(a1) ~ a2
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import Message, lower
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.shares import overlap, share
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.planning.relay_modes import Pass
from lightning_tspipe.runtime.execution.executor import Exchange, Executor, Handler
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.modes.relay.batchnorm import shared_statistics
from lightning_tspipe.runtime.modes.relay.blocks import BlockLoss, BlockPair, BlockShapes
from lightning_tspipe.runtime.modes.relay.early_backwards import EarlyBackwards
from lightning_tspipe.runtime.modes.relay.edges import Inbox, Outbox
from lightning_tspipe.runtime.modes.relay.group import StageGroup
from lightning_tspipe.runtime.modes.relay.step import BlockOutcome, RelayStep
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import (
    Channel,
    Edge,
    Lane,
    edges_among,
    edges_from,
    program_edges,
)
from lightning_tspipe.schedules.relay import relay, relay_pipeline


@dataclass
class Blocks:
    """What all passes run.

    Attributes:
        pairs: The blocks.
        shapes: What flows between them.
        loss: The loss of a block.
        context: The precision plugin's forward context.
        forwards: How many samples each block of the teacher has seen on this rank.
        backwards: Runs the losses' backwards.
    """

    pairs: Sequence[BlockPair]
    shapes: BlockShapes
    loss: BlockLoss
    context: Callable[[], AbstractContextManager[None]]
    forwards: Counter[int]
    backwards: EarlyBackwards


def pipeline_of(walk: Pass) -> Pipeline:
    """Which ranks share which stage."""
    return relay_pipeline([work.ranks for work in walk.stages], is_relayed=walk.is_relayed)


class RelayedPass(Exchange):
    """One rank's part of a pass, again and again.

    Args:
        blocks: What runs.
        walk: Who does what.
        transport: How to reach the others.
        recorder: Notes what this rank does when.
        shares_batchnorm: Whether ranks that share a stage normalise by the samples of all.
    """

    def __init__(
        self,
        blocks: Blocks,
        walk: Pass,
        transport: Transport,
        recorder: Recorder,
        *,
        shares_batchnorm: bool,
    ) -> None:
        self._blocks = blocks
        self._walk = walk
        self._transport = transport
        self._shares_batchnorm = shares_batchnorm
        self._pipeline = pipeline_of(walk)
        self._program = lower(relay(self._pipeline))
        validate(self._program)
        me = transport.rank
        self._stage = next(i for i, work in enumerate(walk.stages) if me in work.ranks)
        self._work = walk.stages[self._stage]
        self.group = StageGroup(transport, self._work.ranks)
        self._recorder = recorder
        handlers: dict[Op, Handler] = {
            Op.DATA: self._data, Op.TEACHER: self._teach, Op.FORWARD: self._train
        }  # fmt: skip
        self._executor = Executor(handlers, self, recorder)
        self._received: list[Tensor] = []
        teacher = self._action(Op.TEACHER)
        # In passes of which a step has several, messages of one come between those of another.
        early = walk.is_relayed and transport.receives_early
        self._inboxes = {
            message: Inbox(transport, message.source, _channel(message), early=early)
            for message in self._program.receives.get(me, ())
            if message.consumer == teacher
        }
        self._outboxes = {
            message: Outbox(transport, message.target, _channel(message), early=early)
            for messages in self._program.sends.values()
            for message in messages
            if message.source == me and message.payload in {"input", "activation"}
        }

    @property
    def num_readers(self) -> int:
        """How often a batch is read for this pass."""
        return 1 if self._walk.is_relayed else len(self._walk.stages)

    @property
    def trained(self) -> tuple[BlockPair, ...]:
        """The blocks that this rank trains in this pass."""
        return tuple(self._blocks.pairs[index] for index in self._work.trained)

    @property
    def edges(self) -> set[Edge]:
        """The edges that the ranks of this pass use."""
        data_rank = self._pipeline.data_rank
        found = program_edges(self._program)
        for work in self._walk.stages:
            found |= edges_among(work.ranks, Lane.SHARED_STATISTICS, Lane.SHARED_GRADIENTS)
            if self._fields_of(work.trained):
                found |= edges_from(data_rank, work.ranks, Lane.FIELDS)
        return found

    @property
    def relays(self) -> set[Edge]:
        """Who relays to whom."""
        messages = self._program.messages
        moved = [m for m in messages if m.payload in {"input", "activation"}]
        return {Edge(m.source, m.target, Lane.PROGRAM) for m in moved}

    def run(self, step: int, x: Tensor | None, samples: int, batch: Any) -> dict[int, BlockOutcome]:
        """Relay one batch and compute the losses of this rank's blocks.

        Args:
            step: Its number.
            x: On the data rank, what the first block gets.
            samples: How many.
            batch: The batch for the losses, with values on the data rank.
        """
        own = share(self.group.unit, self.group.width, samples)
        asked, fields = self._ask(samples), self._exchange_fields(batch, samples)
        context = RelayStep(step, self._program, {}, {}, None, own, samples, x, asked, fields)
        self._executor.run(context, self._program.schedule.ranks[self._transport.rank])
        self._recycle(context.targets)
        return context.outcomes

    def _recycle(self, targets: Mapping[int, Tensor]) -> None:
        """What was received is not needed any more, unless a block has passed it on."""
        received, self._received = self._received, []
        used = {target.untyped_storage().data_ptr() for target in targets.values()}
        if all(part.untyped_storage().data_ptr() not in used for part in received):
            self._transport.recycle(received)

    # Messages

    def _interval(self, action: Action, samples: int) -> tuple[int, int]:
        """The samples of a teacher's action."""
        assert action.unit is not None
        return share(action.unit, len(self._walk.stages[action.stage].ranks), samples)

    def _relayed(self, message: Message, samples: int) -> tuple[int, int]:
        """The samples that a message carries."""
        wanted = self._interval(message.consumer, samples)
        if message.payload == "input":
            return wanted
        return overlap(self._interval(message.producer, samples), wanted)

    def _ask(self, samples: int) -> list[Message]:
        """Ask for what the teacher of this rank gets; the messages in the order of the samples."""
        asked = []
        for message, inbox in self._inboxes.items():
            start, stop = self._relayed(message, samples)
            if start < stop:
                inbox.ask(self._blocks.shapes.input_spec(self._work.first, stop - start))
                asked.append((start, message))
        return [message for _, message in sorted(asked, key=lambda part: part[0])]

    @override
    def take(self, step: RelayStep, action: Action) -> None:
        if action.op is not Op.TEACHER:
            return
        if not step.asked:
            spec = self._blocks.shapes.input_spec(self._work.first, 0)
            nothing = spec.empty(self._device)
            x = step.x
            step.received = nothing if x is None else x[step.own[0] : step.own[1]].detach()
            return
        started = time.perf_counter()
        with waiting(f"what stage {self._stage} is relayed"):
            parts = [self._inboxes[message].take() for message in step.asked]
        self._recorder.paused("receive", started)
        self._received = parts
        step.received = parts[0] if len(parts) == 1 else torch.cat(parts)

    @override
    def send(self, step: RelayStep, action: Action) -> None:
        started, first = time.perf_counter(), 0 if action.op is Op.DATA else step.own[0]
        value = step.x if action.op is Op.DATA else step.relayed
        assert value is not None
        for message in self._program.sends.get(action, ()):
            if message.payload in {"input", "activation"} and message.consumer.op is Op.TEACHER:
                self._send(message, value, first, step.samples)
        self._recorder.paused("send", started)

    def settle(self) -> None:
        """Between two steps, on all ranks: nothing is under way any more."""
        for outbox in self._outboxes.values():
            outbox.settle()
        for inbox in self._inboxes.values():
            with waiting("the end of what is relayed"):
                inbox.settle()

    @property
    def _device(self) -> torch.device:
        tensors = (t for p in self.trained for t in (*p.student.parameters(), *p.student.buffers()))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _send(self, message: Message, tensor: Tensor, first: int, samples: int) -> None:
        """Send the part of a tensor, which begins with sample ``first``, that someone wants."""
        start, stop = self._relayed(message, samples)
        if start < stop:
            block = self._walk.stages[message.consumer.stage].first
            spec = self._blocks.shapes.input_spec(block, stop - start)
            self._outboxes[message].send(tensor[start - first : stop - first], spec)

    def _exchange_fields(self, batch: Any, samples: int) -> Callable[[tuple[int, int]], Any]:
        """Send the fields of the batch that other ranks' losses read, or ask for them.

        Returns:
            Gives the batch as the losses of a share see it.
        """
        leaves, structure = pytree.tree_flatten(batch)
        data_rank, wanted = self._pipeline.data_rank, self._fields_of(self._work.trained)
        receipt = None
        if self._transport.rank == data_rank:
            self._send_fields(leaves, samples)
        elif wanted:
            own = share(self.group.unit, self.group.width, samples)
            specs = [TensorSpec.of(_cut(leaves[i], own, samples)) for i in wanted]
            receipt = self._transport.receive(specs, data_rank, Channel.FIELDS)

        def of_share(own: tuple[int, int]) -> Any:
            parts = [_cut(leaf, own, samples) for leaf in leaves]
            if receipt is not None:
                with waiting("the losses need the batch"):
                    received = receipt.wait()
                for index, tensor in zip(wanted, received, strict=True):
                    parts[index] = tensor
            return pytree.tree_unflatten(parts, structure)

        return of_share

    def _send_fields(self, leaves: Sequence[Any], samples: int) -> None:
        for work in self._walk.stages:
            wanted = self._fields_of(work.trained)
            for unit, rank in enumerate(work.ranks):
                if rank != self._transport.rank and wanted:
                    part = share(unit, len(work.ranks), samples)
                    tensors = [_cut(leaves[i], part, samples) for i in wanted]
                    specs = [TensorSpec.of(tensor) for tensor in tensors]
                    self._transport.send(tensors, rank, Channel.FIELDS, specs)

    def _fields_of(self, trained: Sequence[int]) -> list[int]:
        return sorted({field for block in trained for field in self._blocks.shapes.fields[block]})

    # Work

    def _data(self, step: RelayStep, action: Action) -> bool:
        """Hand the batch to the first stages; it was read, and noted, when the step began."""
        self.send(step, action)
        return False

    def _teach(self, step: RelayStep, action: Action) -> None:
        """The teacher's blocks: inputs and targets of the students, and what is relayed."""
        del action
        x = step.received
        assert x is not None
        with torch.no_grad(), self._blocks.context():
            for index in self._work.forwards:
                y = self._blocks.pairs[index].teacher(x)
                self._blocks.forwards[index] += len(x)
                if index in self._work.trained:
                    step.taken[index], step.targets[index] = x, y
                x = y
        step.relayed, step.received = x, None

    def _train(self, step: RelayStep, action: Action) -> bool:
        """Forward, loss and backward of the students' blocks, one block after the other."""
        (start, stop), samples = step.own, step.samples
        batch = step.fields(step.own)
        with ExitStack() as stack:
            if self.shares_batchnorm:
                students = [pair.student for pair in self.trained]
                stack.enter_context(shared_statistics(students, self.group.exchange))
            for pair in self.trained:
                started = time.perf_counter()
                with self._blocks.context():
                    output = pair.student(step.taken.pop(pair.index))
                    if start < stop:
                        target = step.targets[pair.index]
                        loss = self._blocks.loss(output, target, pair.index, batch)
                    else:
                        loss = 0.0 * output.sum()
                weighed = loss if stop - start == samples else loss * ((stop - start) / samples)
                self._recorder.ran(step.index, action, started)
                started = time.perf_counter()
                stand_in = self._blocks.backwards.run(weighed)
                step.outcomes[pair.index] = BlockOutcome(stand_in, loss.detach(), stop - start)
                del output, loss, weighed  # and what they hold on to
                self._recorder.ran(step.index, self._action(Op.BACKWARD), started)
        return False

    def _action(self, op: Op) -> Action:
        return Action(op, self._stage, self.group.unit)

    @property
    def shares_batchnorm(self) -> bool:
        """Whether BatchNorm layers of this rank's blocks look at the samples of other ranks."""
        return self._shares_batchnorm and self.group.width > 1

    def sum_gradients(self) -> None:
        """After a backward: what the ranks of a shared stage have computed, together."""
        if self.group.width > 1:
            started = time.perf_counter()
            self.group.sum_gradients(self._parameters)
            self._recorder.paused("reduce", started)

    def gather_gradients(self) -> None:
        """What the ranks of a shared stage have added up so far, on the first of them."""
        if self.group.width > 1:
            self.group.sum_gradients(self._parameters, everywhere=False)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for b in self.trained for p in b.student.parameters()]


def _channel(message: Message) -> Channel:
    return Channel.RELAY_INPUT if message.payload == "input" else Channel.RELAY_ACTIVATION


def _cut(leaf: Any, part: tuple[int, int], samples: int) -> Any:
    """A share of a field that has a value for each sample; others whole."""
    if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == samples:
        return leaf[part[0] : part[1]]
    return leaf
