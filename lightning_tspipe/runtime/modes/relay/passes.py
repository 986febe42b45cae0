"""One rank's part of a pass: get a share of what the stage before computed, relay, train.

::

    receive a ──► T of the stage's blocks ──► send on ──► F, loss, B of each block
                     a0 ──► a1 ──► a2                       S0(a0) ~ a1, S1(a1) ~ a2
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Message, Schedule
from lightning_tspipe.ir.shares import overlap, share
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.planning.relay import Pass, Work
from lightning_tspipe.runtime.execution.executor import Exchange, Executor, Handler, StepContext
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.modes.relay.batchnorm import shared_statistics
from lightning_tspipe.runtime.modes.relay.blocks import BlockOutcome, BlockPair, BlockShapes
from lightning_tspipe.runtime.modes.relay.early_backwards import EarlyBackwards
from lightning_tspipe.runtime.modes.relay.edges import Inbox, Outbox, StageGroup
from lightning_tspipe.runtime.transport.channels import (
    Channel,
    Edge,
    Lane,
    edges_around,
    edges_from,
)
from lightning_tspipe.schedules.relay import relay, relay_pipeline


@dataclass
class Blocks:
    """What all passes run.

    Attributes:
        pairs: The blocks.
        shapes: What flows between them.
        forwards: How many samples each block of the teacher has seen on this rank.
        backwards: Runs the losses' backwards.
        shares_batchnorm: Whether ranks that share a stage normalise by the samples of all.
    """

    pairs: Sequence[BlockPair]
    shapes: BlockShapes
    forwards: Counter[int]
    backwards: EarlyBackwards
    shares_batchnorm: bool


def pipeline_of(walk: Pass) -> Pipeline:
    """Which ranks share which stage."""
    return relay_pipeline([work.ranks for work in walk.stages], is_relayed=walk.is_relayed)


def relayed(program: Schedule) -> list[Message]:
    """What the teacher's blocks get from other ranks."""
    return [message for message in program.messages if message.consumer.op is Op.TEACHER]


def edges_of(program: Schedule, readers: Iterable[Work]) -> set[Edge]:
    """The edges that the ranks of a pass use.

    Args:
        program: What they do.
        readers: The stages whose losses read fields of the batch.
    """
    pipeline = program.pipeline
    edges = {Edge(message.source, message.target, Lane.RELAY) for message in relayed(program)}
    for ranks in pipeline.student.groups:
        edges |= edges_around(ranks, Lane.PROGRAM)
    for work in readers:
        edges |= edges_from(pipeline.data_rank, work.ranks, Lane.FIELDS)
    return edges


@dataclass
class _Step(StepContext):
    """One batch on its way through a pass.

    Attributes:
        own: This rank's share of its samples: the first, and one after the last.
        samples: How many there are in all.
        x: On the data rank, what the first block gets.
        asked: What will come, in the order of the samples.
        fields: Gives the batch as the losses of this rank see it.
        values: What the teacher's blocks get, and behind the last what it gave.
        outcomes: Of the losses of the blocks that are trained.
    """

    own: tuple[int, int] = (0, 0)
    samples: int = 0
    x: Tensor | None = None
    asked: Sequence[Inbox] = ()
    fields: Callable[[], Any] = lambda: None
    values: dict[int, Tensor] = field(default_factory=dict)
    outcomes: dict[int, BlockOutcome] = field(default_factory=dict)

    @override
    def runs(self, action: Action) -> bool:
        return True  # also for a share without samples: others wait for what it sends


class RelayedPass(Exchange):
    """One rank's part of a pass, again and again.

    Args:
        here: This rank.
        blocks: What runs.
        walk: Who does what.

    Attributes:
        group: The ranks that share this rank's stage.
        num_readers: How often a batch is read for this pass.
        edges: The edges that the ranks of this pass use.
    """

    def __init__(self, here: Rank, blocks: Blocks, walk: Pass) -> None:
        self._here, self._transport, self._recorder = here, here.transport, here.recorder
        self._blocks = blocks
        self._walk = walk
        program, me = relay(pipeline_of(walk)), here.transport.rank
        validate(program)
        self._program = program
        handlers: dict[Op, Handler] = {
            Op.DATA: self._data, Op.TEACHER: self._teach, Op.FORWARD: self._train
        }  # fmt: skip
        self._executor = Executor(handlers, self, here.recorder)
        self._stage = next(i for i, work in enumerate(walk.stages) if me in work.ranks)
        self._work = walk.stages[self._stage]
        self._data_rank = program.pipeline.data_rank
        self._trained = [blocks.pairs[index] for index in self._work.trained]
        self.group = StageGroup(here.transport, self._work.ranks)
        self.num_readers = 1 if walk.is_relayed else len(walk.stages)
        # In passes of which a step has several, messages of one come between those of another.
        early = walk.is_relayed
        moved = relayed(program)
        self._inboxes = {
            message: Inbox(here.transport, message.source, early=early)
            for message in moved
            if message.target == me
        }
        self._outboxes = {
            message: Outbox(here.transport, message.target, early=early)
            for message in moved
            if message.source == me
        }
        self.edges = edges_of(program, [work for work in walk.stages if self._fields_of(work)])

    def run(self, step: int, x: Tensor | None, samples: int, batch: Any) -> dict[int, BlockOutcome]:
        """Relay one batch and compute the losses of this rank's blocks.

        Args:
            step: Its number.
            x: On the data rank, what the first block gets.
            samples: How many.
            batch: The batch for the losses, with values on the data rank.
        """
        own = share(self.group.unit, self.group.width, samples)
        asked, fields = self._ask(samples), self._exchange_fields(batch, samples, own)
        context = _Step(step, self._program, {}, {}, None, own, samples, x, asked, fields)
        self._executor.run(context, self._program.ranks[self._transport.rank])
        return context.outcomes

    # Messages

    def _relayed(self, message: Message, samples: int) -> tuple[int, int]:
        """The samples that a message carries."""

        def part(action: Action) -> tuple[int, int]:
            if action.unit is None:
                return 0, samples
            return share(action.unit, len(self._walk.stages[action.stage].ranks), samples)

        return overlap(part(message.producer), part(message.consumer))

    def _ask(self, samples: int) -> list[Inbox]:
        """Ask for what the teacher of this rank gets; in the order of the samples."""
        asked = []
        for message, inbox in self._inboxes.items():
            start, stop = self._relayed(message, samples)
            if start < stop:
                inbox.ask(self._blocks.shapes.input_spec(self._work.first, stop - start))
                asked.append((start, inbox))
        return [inbox for _, inbox in sorted(asked, key=lambda part: part[0])]

    @override
    def take(self, step: _Step, action: Action) -> None:
        if action.op is not Op.TEACHER:
            return
        if step.asked:
            started = time.perf_counter()
            with waiting(f"what stage {self._stage} is relayed"):
                parts = [inbox.take() for inbox in step.asked]
            self._recorder.paused("receive", started)
            value = parts[0] if len(parts) == 1 else torch.cat(parts)
        elif step.x is not None:
            value = step.x[step.own[0] : step.own[1]].detach()
        else:
            value = self._blocks.shapes.input_spec(self._work.first, 0).empty(self._here.device)
        step.values[self._work.first] = value

    @override
    def send(self, step: _Step, action: Action) -> None:
        started, first, tensor = time.perf_counter(), 0, step.x
        if action.op is Op.TEACHER:
            first, tensor = step.own[0], step.values[self._work.forwards.stop]
        assert tensor is not None
        for message, outbox in self._outboxes.items():
            start, stop = self._relayed(message, step.samples)
            if message.producer == action and start < stop:
                block = self._walk.stages[message.consumer.stage].first
                spec = self._blocks.shapes.input_spec(block, stop - start)
                outbox.send(tensor[start - first : stop - first], spec)
        self._recorder.paused("send", started)

    def settle(self) -> None:
        """Between two steps, on all ranks: nothing is under way any more."""
        for outbox in self._outboxes.values():
            outbox.settle()
        for inbox in self._inboxes.values():
            with waiting("the end of what is relayed"):
                inbox.settle()

    def _exchange_fields(self, batch: Any, samples: int, own: tuple[int, int]) -> Callable[[], Any]:
        """Send the fields of the batch that other ranks' losses read, or ask for them.

        Returns:
            Gives the batch as the losses of this rank see it.
        """
        leaves, structure = pytree.tree_flatten(batch)
        wanted, receipt = self._fields_of(self._work), None
        if self._transport.rank == self._data_rank:
            for work in self._walk.stages:
                self._send_fields(leaves, samples, work)
        elif wanted:
            specs = [TensorSpec.of(_cut(leaves[i], own, samples)) for i in wanted]
            receipt = self._transport.receive(specs, self._data_rank, Channel.FIELDS)

        def of_share() -> Any:
            parts = [_cut(leaf, own, samples) for leaf in leaves]
            if receipt is not None:
                with waiting("the losses need the batch"):
                    received = receipt.wait()
                for index, tensor in zip(wanted, received, strict=True):
                    parts[index] = tensor
            return pytree.tree_unflatten(parts, structure)

        return of_share

    def _send_fields(self, leaves: Sequence[Any], samples: int, work: Work) -> None:
        for unit, rank in enumerate(work.ranks):
            part = share(unit, len(work.ranks), samples)
            tensors = [_cut(leaves[i], part, samples) for i in self._fields_of(work)]
            if tensors and rank != self._data_rank:
                specs = list(map(TensorSpec.of, tensors))
                self._transport.send(tensors, rank, Channel.FIELDS, specs)

    def _fields_of(self, work: Work) -> list[int]:
        fields = self._blocks.shapes.fields
        return sorted({field for block in work.trained for field in fields[block]})

    # Work

    def _data(self, step: _Step, action: Action) -> bool:
        """Hand the batch to the first stages; it was read, and noted, when the step began."""
        self.send(step, action)
        return False

    def _teach(self, step: _Step, action: Action) -> None:
        """The teacher's blocks: what students get and are to give, and what is relayed."""
        del action
        values, trained = step.values, self._work.trained
        with torch.no_grad(), self._here.context():
            for index in self._work.forwards:
                values[index + 1] = self._blocks.pairs[index].teacher(values[index])
                self._blocks.forwards[index] += len(values[index])
                if index not in trained and index - 1 not in trained:
                    del values[index]

    def _train(self, step: _Step, action: Action) -> bool:
        """Forward, loss and backward of the students' blocks, one block after the other."""
        number, batch = step.own[1] - step.own[0], step.fields()
        module: Any = self._here.module
        shares = self._blocks.shares_batchnorm and self.group.width > 1
        students = [pair.student for pair in self._trained]
        with shared_statistics(students, self.group.exchange) if shares else nullcontext():
            for pair in self._trained:
                started = time.perf_counter()
                with self._here.context():
                    output = pair.student(step.values[pair.index])
                    if number:
                        target = step.values[pair.index + 1]
                        loss = module.block_loss(output, target, pair.index, batch)
                    else:
                        loss = 0.0 * output.sum()
                weighed = loss if number == step.samples else loss * (number / step.samples)
                self._recorder.ran(step.index, action, started)
                started = time.perf_counter()
                stand_in = self._blocks.backwards.run(weighed)
                step.outcomes[pair.index] = BlockOutcome(stand_in, loss.detach(), number)
                del output, loss, weighed  # and what they hold on to
                backward = Action(Op.BACKWARD, self._stage, self.group.unit)
                self._recorder.ran(step.index, backward, started)
        return False

    def sum_gradients(self, *, everywhere: bool = True) -> None:
        """What the ranks of a shared stage have computed, together: on all, or on the first."""
        if self.group.width > 1:
            started = time.perf_counter()
            parameters = [p for pair in self._trained for p in pair.student.parameters()]
            self.group.sum_gradients(parameters, everywhere=everywhere)
            if everywhere:
                self._recorder.paused("reduce", started)


def _cut(leaf: Any, part: tuple[int, int], samples: int) -> Any:
    """A share of a field that has a value for each sample; others whole."""
    if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == samples:
        return leaf[part[0] : part[1]]
    return leaf
