"""One rank's part in blockwise distillation: an engine whose stages don't wait for each other.

Placement, weights, evaluation and checkpoints are those of every engine. What differs is the step:
each rank has losses of its own, updates when it is done, and is as far as its input is. ::

    begin    header from the data rank; a rank waits here only for those that it is too far ahead of
    run      relay and train, once for each pass of the mode, the blocks' backwards included
    backward of what stands for the losses; then the sum over the ranks that share its stage
    finish   tell the rank that relayed to this one

In a pass, a rank gets its share of what the stage before computed, relays, and trains::

    receive a ──► T of the stage's blocks ──► send on ──► F, loss, B of each block
                     a0 ──► a1 ──► a2                       S0(a0) ~ a1, S1(a1) ~ a2
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.capture.plan import NetworkName, TensorSpec
from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Message, Schedule
from lightning_tspipe.ir.shares import overlap, share
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.relay import Pass, Work
from lightning_tspipe.runtime.batches.metadata import StepHeader
from lightning_tspipe.runtime.execution.engine import Engine, Rank
from lightning_tspipe.runtime.execution.executor import Executor, Pace
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.modes.relay.batchnorm import shared_statistics
from lightning_tspipe.runtime.modes.relay.blocks import BlockOutcome, BlockPair, BlockShapes
from lightning_tspipe.runtime.modes.relay.early_backwards import EarlyBackwards
from lightning_tspipe.runtime.modes.relay.edges import Inbox, Outbox, StageGroup
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.transport import channels
from lightning_tspipe.runtime.weights.materializing import Materializer
from lightning_tspipe.schedules.relay import relay, relay_pipeline

NETWORKS = Networks(("student",), ("teacher",))


@dataclass(frozen=True)
class RelayOptions:
    """How ranks keep together.

    Attributes:
        run_ahead: How many steps a rank may be ahead of those that it relays to.
        has_barrier: Whether all ranks end each step together.
        shares_batchnorm: Whether ranks that share a stage normalise by the samples of all.
    """

    run_ahead: int = 2
    has_barrier: bool = False
    shares_batchnorm: bool = True


def capture_blocks(
    here: Rank, pairs: Sequence[BlockPair], block_input: Callable[[Any], Tensor], batch: Any
) -> Captured:
    """Trace both networks from end to end, as an evaluation walks them.

    Args:
        here: This rank.
        pairs: The blocks.
        block_input: What the first block gets of a batch.
        batch: A batch, the same on all ranks.
    """
    module: Any = here.module
    student, teacher = module.student, module.teacher
    # A list of blocks has no forward of its own.
    if isinstance(student, nn.ModuleList):
        student = nn.Sequential(*(pair.student for pair in pairs))
    if isinstance(teacher, nn.ModuleList):
        teacher = nn.Sequential(*(pair.teacher for pair in pairs))

    def step(batch: Any) -> list[Tensor]:
        x = block_input(batch)
        return [student(x), teacher(x)]

    return here.capture(step, batch, training=False)


class RelayEngine(Engine):
    """One rank of blockwise distillation.

    Args:
        here: This rank.
        captured: What :func:`capture_blocks` found.
        pairs: The blocks.
        shapes: What flows between them.
        passes: Who does what with each batch.
        options: How ranks keep together.
        materializer: Where the values come from, of a module that has none.

    Attributes:
        pairs: The same.
        shapes: The same.
        options: The same.
        passes: This rank's part of each.
        backwards: Runs the blocks' backwards.
        forwards: How many samples each block of the teacher has seen on this rank.
        batch: The batch of this step as this rank has it; values are on the data rank.
        bytes_loaded: Of batches, as if devices that read the same one each had a loader.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - everything that a rank needs to begin
        self,
        here: Rank,
        captured: Captured,
        pairs: Sequence[BlockPair],
        shapes: BlockShapes,
        passes: Sequence[Pass],
        options: RelayOptions,
        materializer: Materializer | None = None,
    ) -> None:
        placement = _placement(captured, pairs, passes, here.transport.num_ranks)
        super().__init__(here, captured, placement, materializer)
        self.pipeline = pipeline_of(passes[0])  # a chain, as the base class has it, in evaluations
        self.pairs, self.shapes, self.options = pairs, shapes, options
        self.backwards = EarlyBackwards(self.module.parameters())
        self.forwards: Counter[int] = Counter()
        self.passes = [RelayedPass(self, walk) for walk in passes]
        if any(walk.group.unit > 0 for walk in self.passes):
            self.copies = set(self.module.parameters())
        self.transport.steps_under_way = max(1, options.run_ahead) + len(passes[0].stages)
        edges = {edge for walk in self.passes for edge in walk.edges}
        self.transport.open(edges)
        relays = {edge for edge in edges if edge.lane is channels.Lane.RELAY}
        self._pace = Pace(self.transport, relays, options.run_ahead)
        self._adds_up = False  # whether gradients wait for more of them
        self.bytes_loaded = 0
        self._header: StepHeader | None = None
        self._round_inputs: list[Tensor] = []
        self.batch: Any = None

    def begin(self, batch: Any, make_inputs: Callable[[Any], Sequence[Tensor]]) -> None:
        """All ranks begin a step.

        Args:
            batch: The batch, on the data rank.
            make_inputs: Makes of it what the first block gets, in each round of the step.
        """
        started = time.perf_counter()
        self._pace.wait()
        self.recorder.paused("send", started)
        started = time.perf_counter()

        def describe() -> StepHeader:
            self._round_inputs = list(make_inputs(batch))
            inputs = tuple((x,) for x in self._round_inputs)
            return StepHeader.of(batch, inputs, stop=self.stop.next_word())

        self._header = self.share_header(describe)
        if self.is_data_rank:
            self.batch = batch
            specs = [leaf for leaf in self._header.leaves if isinstance(leaf, TensorSpec)]
            loaded = sum(spec.num_bytes for spec in specs)
            self.bytes_loaded += loaded * sum(walk.num_readers for walk in self.passes)
            self.recorder.ran(self._index, Action(Op.DATA, self.rank), started)
        else:
            self.batch = self._header.batch()
            self.recorder.paused("receive", started)
        self.batch_size = self._header.inputs[0][0].shape[0]

    def run_round(self, number: int) -> dict[int, BlockOutcome]:
        """Relay, and compute the losses of this rank's blocks.

        Args:
            number: The round of the step.
        """
        assert self._header is not None
        samples = self._header.inputs[number][0].shape[0]
        x = self._round_inputs[number] if self.is_data_rank else None
        found: dict[int, BlockOutcome] = {}
        for walk in self.passes:
            found |= walk.relay(x, samples)
        return found

    @override
    def backward(self, run_backward: Callable[[], None] | None, *, reduce: bool = True) -> None:
        """The backward of this rank's losses.

        Args:
            run_backward: Runs it.
            reduce: Whether gradients become those of the whole batch, where a stage is shared.
        """
        assert run_backward is not None
        run_backward()
        self.backwards.settle()
        self._adds_up = not reduce
        if reduce:
            for walk in self.passes:
                walk.sum_gradients()

    @override
    def settle(self, *, keeps_flights: bool = False) -> None:
        """Between two steps: of a shared stage, the first rank gets what all have added up."""
        del keeps_flights  # nothing runs ahead
        if self._adds_up:
            for walk in self.passes:
                walk.sum_gradients(everywhere=False)

    def finish(self) -> None:
        """The step is over on this rank."""
        started = time.perf_counter()
        self._pace.tell()
        with waiting(f"the end of batch {self._index}"):
            self.transport.finish_step()
            if self.options.has_barrier:
                self.transport.gather_everywhere(None)
        self.recorder.paused("send", started)
        self._index += 1
        self._round_inputs, self.batch, self._header = [], None, None

    @override
    def drain(self) -> None:
        """Wait until the ranks behind this one have caught up."""
        self._pace.wait(0)
        for walk in self.passes:
            walk.settle()

    @override
    def note_optimizer(self, started: float) -> None:
        # In between, the next step has not begun.
        index = self._index - (self._header is None)
        self.recorder.ran(index, Action(Op.OPTIMIZER, self.rank), started)


@dataclass
class _Step:
    """One batch on its way through a pass.

    Attributes:
        index: Its number.
        own: This rank's share of its samples: the first, and one after the last.
        samples: How many there are in all.
        x: On the data rank, what the first block gets.
        asked: What will come, in the order of the samples.
        fields: Gives the batch as the losses of this rank see it.
        values: What the teacher's blocks get, and behind the last what it gave.
        outcomes: Of the losses of the blocks that are trained.
    """

    index: int
    own: tuple[int, int]
    samples: int
    x: Tensor | None
    asked: Sequence[Inbox]
    fields: Callable[[], Any]
    values: dict[int, Tensor] = field(default_factory=dict)
    outcomes: dict[int, BlockOutcome] = field(default_factory=dict)

    def runs(self, _action: Action) -> bool:
        """Also for a share without samples: others wait for what it sends."""
        return True


class RelayedPass(Executor):
    """One rank's part of a pass, again and again.

    Args:
        engine: The rank's engine.
        walk: Who does what.

    Attributes:
        group: The ranks that share this rank's stage.
        num_readers: How often a batch is read for this pass.
        edges: The edges that the ranks of this pass use.
    """

    def __init__(self, engine: RelayEngine, walk: Pass) -> None:
        super().__init__(engine.transport, engine.recorder)
        self._engine, self._walk = engine, walk
        program, me = relay(pipeline_of(walk)), engine.rank
        validate(program)
        self._actions = program.ranks[me]
        self.handlers |= {Op.TEACHER: self._teach, Op.FORWARD: self._train}
        self._stage = next(i for i, work in enumerate(walk.stages) if me in work.ranks)
        self._work = walk.stages[self._stage]
        self._trained = [engine.pairs[index] for index in self._work.trained]
        self.group = StageGroup(self.transport, self._work.ranks)
        self.num_readers = 1 if walk.is_relayed else len(walk.stages)
        # In passes of which a step has several, messages of one come between those of another.
        early = walk.is_relayed
        self._inboxes: dict[Message, Inbox] = {}
        self._outboxes: dict[Message, Outbox] = {}
        for message in relayed(program):
            if message.target == me:
                self._inboxes[message] = Inbox(self.transport, message.source, early=early)
            if message.source == me:
                self._outboxes[message] = Outbox(self.transport, message.target, early=early)
        self.edges = edges_of(program, [work for work in walk.stages if self._fields_of(work)])

    def relay(self, x: Tensor | None, samples: int) -> dict[int, BlockOutcome]:
        """Relay the engine's batch and compute the losses of this rank's blocks.

        Args:
            x: On the data rank, what the first block gets.
            samples: How many.
        """
        own = share(self.group.unit, self.group.width, samples)
        asked, fields = self._ask(samples), self._exchange_fields(samples, own)
        context = _Step(self._engine.position[1], own, samples, x, asked, fields)
        self.run(context, self._actions)
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
                inbox.ask(self._engine.shapes.input_spec(self._work.first, stop - start))
                asked.append((start, inbox))
        return [inbox for _, inbox in sorted(asked, key=lambda part: part[0])]

    @override
    def take(self, step: _Step, action: Action) -> None:
        if action.op is not Op.TEACHER:
            return
        if step.asked:
            started = time.perf_counter()
            with waiting(f"the relayed input of stage {self._stage}"):
                parts = [inbox.take() for inbox in step.asked]
            self.recorder.paused("receive", started)
            value = parts[0] if len(parts) == 1 else torch.cat(parts)
        elif step.x is not None:
            value = step.x[step.own[0] : step.own[1]].detach()
        else:
            value = self._engine.shapes.input_spec(self._work.first, 0).empty(self._engine.device)
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
                spec = self._engine.shapes.input_spec(block, stop - start)
                outbox.send(tensor[start - first : stop - first], spec)
        self.recorder.paused("send", started)

    def settle(self) -> None:
        """Between two steps, on all ranks: nothing is under way any more."""
        for outbox in self._outboxes.values():
            outbox.settle()
        for inbox in self._inboxes.values():
            with waiting("the end of relayed data"):
                inbox.settle()

    def _exchange_fields(self, samples: int, own: tuple[int, int]) -> Callable[[], Any]:
        """Send the fields of the batch that other ranks' losses read, or ask for them.

        Returns:
            Gives the batch as the losses of this rank see it.
        """
        leaves, structure = pytree.tree_flatten(self._engine.batch)
        wanted, receipt = self._fields_of(self._work), None
        if self._engine.is_data_rank:
            for work in self._walk.stages:
                self._send_fields(leaves, samples, work)
        elif wanted:
            specs = [TensorSpec.of(_cut(leaves[i], own, samples)) for i in wanted]
            data_rank = self._engine.placement.data_rank
            receipt = self.transport.receive(specs, data_rank, channels.Channel.FIELDS)

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
            if tensors and rank != self.transport.rank:
                specs = list(map(TensorSpec.of, tensors))
                self.transport.send(tensors, rank, channels.Channel.FIELDS, specs)

    def _fields_of(self, work: Work) -> list[int]:
        fields = self._engine.shapes.fields
        return sorted({field for block in work.trained for field in fields[block]})

    # Work

    def _teach(self, step: _Step, _: Action) -> None:
        """The teacher's blocks: what students get and are to give, and what is relayed."""
        values, trained, engine = step.values, self._work.trained, self._engine
        with torch.no_grad(), engine.context():
            for index in self._work.forwards:
                values[index + 1] = engine.pairs[index].teacher(values[index])
                engine.forwards[index] += len(values[index])
                if index not in trained and index - 1 not in trained:
                    del values[index]

    def _train(self, step: _Step, action: Action) -> bool:
        """Forward, loss and backward of the students' blocks, one block after the other."""
        number, batch = step.own[1] - step.own[0], step.fields()
        engine, module = self._engine, cast("Any", self._engine.module)
        shares = engine.options.shares_batchnorm and self.group.width > 1
        students = [pair.student for pair in self._trained]
        with shared_statistics(students, self.group.exchange) if shares else nullcontext():
            for pair in self._trained:
                started = time.perf_counter()
                with engine.context():
                    output = pair.student(step.values[pair.index])
                    if number:
                        target = step.values[pair.index + 1]
                        loss = module.block_loss(output, target, pair.index, batch)
                    else:
                        loss = 0.0 * output.sum()
                weighed = loss if number == step.samples else loss * (number / step.samples)
                self.recorder.ran(step.index, action, started)
                started = time.perf_counter()
                stand_in = engine.backwards.run(weighed)
                step.outcomes[pair.index] = BlockOutcome(stand_in, loss.detach(), number)
                del output, loss, weighed  # and what they hold on to
                backward = Action(Op.BACKWARD, self._stage, self.group.unit)
                self.recorder.ran(step.index, backward, started)
        return False

    def sum_gradients(self, *, everywhere: bool = True) -> None:
        """What the ranks of a shared stage have computed, together: on all, or on the first."""
        if self.group.width > 1:
            started = time.perf_counter()
            parameters = [p for pair in self._trained for p in pair.student.parameters()]
            self.group.sum_gradients(parameters, everywhere=everywhere)
            if everywhere:
                self.recorder.paused("reduce", started)


def pipeline_of(walk: Pass) -> Pipeline:
    """Which ranks share which stage."""
    return relay_pipeline([work.ranks for work in walk.stages], is_relayed=walk.is_relayed)


def relayed(program: Schedule) -> list[Message]:
    """What the teacher's blocks get from other ranks."""
    return [message for message in program.messages if message.consumer.op is Op.TEACHER]


def edges_of(program: Schedule, readers: Iterable[Work]) -> set[channels.Edge]:
    """The edges that the ranks of a pass use.

    Args:
        program: What they do.
        readers: The stages whose losses read fields of the batch.
    """
    pipeline = program.pipeline
    edges = {channels.Edge(m.source, m.target, channels.Lane.RELAY) for m in relayed(program)}
    for ranks in pipeline.student.groups:
        edges |= channels.edges_around(ranks, channels.Lane.PROGRAM)
    for work in readers:
        edges |= channels.edges_from(pipeline.data_rank, work.ranks, channels.Lane.FIELDS)
    return edges


def _cut(leaf: Any, part: tuple[int, int], samples: int) -> Any:
    """A share of a field that has a value for each sample; others whole."""
    if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == samples:
        return leaf[part[0] : part[1]]
    return leaf


def _placement(
    captured: Captured, pairs: Sequence[BlockPair], passes: Sequence[Pass], num_ranks: int
) -> Placement:
    """Each block is a stage of its own, on all ranks that run it."""

    def ranks_of(stages: Iterable[Work]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(rank for work in stages for rank in work.ranks))

    works = [work for walk in passes for work in walk.stages]
    trained = tuple(ranks_of(w for w in works if p.index in w.trained) for p in pairs)
    run = tuple(ranks_of(w for w in works if p.index in w.forwards) for p in pairs)
    student = _cuts(captured, "student", [pair.name for pair in pairs])
    teacher = _cuts(captured, "teacher", [pair.teacher_name for pair in pairs])
    return Placement(
        num_ranks, student, tuple(ranks[0] for ranks in trained), teacher,
        tuple(ranks[0] for ranks in run), student_holders=trained, teacher_holders=run,
    )  # fmt: skip


def _cuts(captured: Captured, network: NetworkName, names: Sequence[str]) -> tuple[int, ...]:
    """The first atom of each block, and the number of atoms."""
    atoms = [atom.name.partition("..")[0] for atom in captured.networks[network].atoms]
    starts = [
        next(i for i, atom in enumerate(atoms) if f"{atom}.".startswith(f"{name}."))
        for name in names[1:]
    ]
    cuts = (0, *starts, len(atoms))
    assert all(a < b for a, b in pairwise(cuts)), (names, atoms)
    return cuts
