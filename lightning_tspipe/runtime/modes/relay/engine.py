"""One rank's part in blockwise distillation: an engine whose stages don't wait for each other.

Placement, weights, evaluation and checkpoints are those of every engine. What differs is the step:
each rank has losses of its own, updates when it is done, and is as far as its input is. ::

    begin    header from the data rank; a rank waits here only for those that it is too far ahead of
    run      relay and train, once for each pass of the mode, the blocks' backwards included
    backward of what stands for the losses; then the sum over the ranks that share its stage
    finish   tell the rank that relayed to this one
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.relay import Pass
from lightning_tspipe.runtime.batches.metadata import StepHeader
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.executor import Pace
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.modes.relay.blocks import BlockOutcome, BlockPair, BlockShapes
from lightning_tspipe.runtime.modes.relay.passes import (
    Blocks,
    EarlyBackwards,
    RelayedPass,
    pipeline_of,
)
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.transport.channels import Lane
from lightning_tspipe.runtime.weights.materializing import Materializer

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
        backwards: Runs the blocks' backwards.
        blocks: What all passes run.
        passes: This rank's part of each.
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
        self.backwards = EarlyBackwards(self.module.parameters())
        self.blocks = Blocks(pairs, shapes, Counter(), self.backwards, options.shares_batchnorm)
        self.passes = [RelayedPass(here, self.blocks, walk) for walk in passes]
        self.is_copy = any(walk.group.unit > 0 for walk in self.passes)
        self.options = options
        self.transport.steps_under_way = max(1, options.run_ahead) + len(passes[0].stages)
        edges = {edge for walk in self.passes for edge in walk.edges}
        self.transport.open(edges)
        relays = {edge for edge in edges if edge.lane is Lane.RELAY}
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
            return StepHeader.of(batch, self._round_inputs, stop=self.stop.next_word())

        self._header = self.share_header(describe)
        if self.is_data_rank:
            self.batch = batch
            loaded = sum(
                leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)
            )
            self.bytes_loaded += loaded * sum(walk.num_readers for walk in self.passes)
            self.recorder.ran(self._index, Action(Op.DATA, self.rank), started)
        else:
            self.batch = self._header.batch()
            self.recorder.paused("receive", started)
        self.batch_size = self._header.inputs[0].shape[0]

    def run_round(self, number: int) -> dict[int, BlockOutcome]:
        """Relay, and compute the losses of this rank's blocks.

        Args:
            number: The round of the step.
        """
        assert self._header is not None
        samples = self._header.inputs[number].shape[0]
        x = self._round_inputs[number] if self.is_data_rank else None
        found: dict[int, BlockOutcome] = {}
        for walk in self.passes:
            found |= walk.relay(self._index, x, samples, self.batch)
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
                self.transport.gather_object(None)
                self.transport.broadcast_object(None, 0)
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


def _placement(
    captured: Captured, pairs: Sequence[BlockPair], passes: Sequence[Pass], num_ranks: int
) -> Placement:
    """Each block is a stage of its own, on all ranks that run it."""
    trained: dict[int, list[int]] = {pair.index: [] for pair in pairs}
    run: dict[int, list[int]] = {pair.index: [] for pair in pairs}
    for work in (work for walk in passes for work in walk.stages):
        for held, blocks in ((trained, work.trained), (run, work.forwards)):
            for block in blocks:
                held[block] += [rank for rank in work.ranks if rank not in held[block]]
    student = _cuts(captured, "student", [pair.name for pair in pairs])
    teacher = _cuts(captured, "teacher", [pair.teacher_name for pair in pairs])
    return Placement(
        num_ranks,
        student, tuple(ranks[0] for ranks in trained.values()),
        teacher, tuple(ranks[0] for ranks in run.values()),
        student_holders=tuple(map(tuple, trained.values())),
        teacher_holders=tuple(map(tuple, run.values())),
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
