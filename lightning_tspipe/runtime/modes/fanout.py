"""Fan-out: heads on a frozen trunk, each with a loss of its own.

The module runs its step once for each of a rank's heads, on the features that the first one has
waited for. So the first head's forward and backward run those of all heads of the rank::

    0F0 1F0   the step, for heads 0 and 1     0B0 1B0   the backward of the sum of their losses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import StepPlan
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import LOSS_RANK, Coupling, NetworkLayout, Pipeline
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.batches.metadata import NOTHING_KNOWN, Known, StepHeader
from lightning_tspipe.runtime.execution.executor import Handler, Pace, StepContext
from lightning_tspipe.runtime.execution.losses import Losses
from lightning_tspipe.runtime.execution.rank import TrainingMode
from lightning_tspipe.runtime.stages.captured import Captured, Division, values_of_teacher
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Edge, Lane, edges_from
from lightning_tspipe.schedules.fanout import fanout


@final
class Fanout(TrainingMode):
    """Heads on a trunk.

    Args:
        heads: The heads.
        trains: Whether they are trained: then features may be known, and heads may have stopped.
    """

    has_fixed_teacher: ClassVar[bool] = True
    saves_lookahead: ClassVar[bool] = False  # a trunk that never changes runs again

    def __init__(self, heads: Heads, *, trains: bool = True) -> None:
        super().__init__()
        self.beside = {"student": heads}
        self.apart = heads.student
        self.forwards = partial(fanout, before=0, following=0, depth=0)
        self.rehearsing, self.prologue = heads.rehearsing, heads.beginning
        self._heads = heads
        self._trains = trains
        self._cache = heads.cache if trains else None
        self._known: dict[int, Known] = {}

    @override
    def layout(self, captured: Captured, division: Division) -> Pipeline:
        trunk, number = division.layouts(captured)["teacher"], division.num_ranks
        outputs = frozenset(range(len(self._heads.atoms)))
        heads = NetworkLayout(division.ranks["student"], 1, 1, outputs)
        return Pipeline(number, heads, trunk, number - 1, LOSS_RANK, Coupling.FANOUT)

    @property
    @override
    def in_evaluation(self) -> TrainingMode:
        return Fanout(self._heads, trains=False)

    @override
    def handlers(self, losses: Losses) -> dict[Op, Handler]:
        def is_first(context: StepContext, action: Action) -> bool:
            pipeline = context.program.schedule.pipeline
            return action.stage == pipeline.stages_of(pipeline.student.ranks[action.stage])[0]

        def forward(context: StepContext, action: Action) -> bool:
            if is_first(context, action):
                if self._trains and not self._heads.student.trained:
                    # All of this rank's heads have stopped.
                    device = self._heads.device
                    context.result = torch.zeros((), device=device, requires_grad=True)
                else:
                    self._give_features(losses, context)
                    losses.run(context, action)
            return False

        def loss(context: StepContext, action: Action) -> bool:
            del context, action
            return False  # the heads' forwards end with it

        def backward(context: StepContext, action: Action) -> bool:
            return is_first(context, action) and losses.run(context, action)

        return {Op.FORWARD: forward, Op.LOSS: loss, Op.BACKWARD: backward}

    def _give_features(self, losses: Losses, context: StepContext) -> None:
        """The features of a batch of which some were known."""
        known = self._known.get(context.index, NOTHING_KNOWN)
        if known.rows is not None:
            assert self._cache is not None
            values = values_of_teacher(losses.plan)
            computed = losses.computed(context, values) if known.rows else []
            whole = self._cache.whole(known, computed, self._heads.device)
            losses.give(dict(zip(values, whole, strict=True)))

    @override
    def reuses_inputs(self, plan: StepPlan) -> bool:
        # What a step does on this rank is what its replay does: one that trains no head has nothing
        # to do in it.
        return not plan.has_effects

    @override
    def see(self, batch: Any, inputs: Sequence[Tensor]) -> Known:
        return NOTHING_KNOWN if self._cache is None else self._cache.see(batch, inputs)

    @override
    def expect(self, headers: Mapping[int, StepHeader]) -> None:
        self._known = {number: header.known for number, header in headers.items()}

    @override
    def pace(self, transport: Transport, pipeline: Pipeline, placement: Placement) -> Pace | None:
        if transport.is_tight:
            return None
        trunk = placement.teacher_ranks
        edges = {Edge(source, target, Lane.PROGRAM) for source, target in pairwise(trunk)}
        edges |= edges_from(trunk[-1], pipeline.loss_ranks, Lane.PROGRAM)
        return Pace(transport, edges, max(1, placement.depth + 1 - len(trunk)))

    @override
    def begin(self, rank: int, pipeline: Pipeline) -> None:
        student = self._heads.student
        student.here = tuple(student.names[stage] for stage in pipeline.stages_of(rank))

    @override
    def begin_epoch(self, transport: Transport, pipeline: Pipeline) -> None:
        if self._cache is not None:
            self._cache.place(transport, pipeline)

    @override
    def end(self) -> None:
        self._heads.student.here = self._heads.student.names
