"""Frozen beginnings: a prefix of the student, and a trunk whose heads have losses of their own.

The module of a fan-out runs its step once for each of a rank's heads, on the features that the
first one has waited for. So the first head's forward and backward run those of all its heads::

    0F0 1F0   the step, for heads 0 and 1     0B0 1B0   the backward of the sum of their losses
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import ClassVar, final

import torch
from typing_extensions import override

from lightning_tspipe.capture.plan import StepPlan
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import LOSS_RANK, Coupling, NetworkLayout, Pipeline
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.batches.metadata import NOTHING_KNOWN
from lightning_tspipe.runtime.execution.engine import TrainingMode
from lightning_tspipe.runtime.execution.executor import Handler, Losses, Pace, StepContext
from lightning_tspipe.runtime.stages.captured import Captured, values_of_teacher
from lightning_tspipe.runtime.stages.frozen import FrozenPart
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Edge, Lane, edges_from


@final
class Prefix(TrainingMode):
    """A student whose first atoms are frozen, and run where a teacher would.

    Args:
        part: The frozen atoms.
    """

    saves_lookahead: ClassVar[bool] = False  # whoever goes on gets the same from the same weights
    _coupling: ClassVar[Coupling] = Coupling.PREFIX

    def __init__(self, part: FrozenPart) -> None:
        super().__init__()
        if part.front is not None:
            self.see = part.front.see
        part.known = self.known

    @override
    def whole(self, placement: Placement) -> Placement:
        return replace(
            placement,
            student_cuts=(*placement.teacher_cuts, *placement.student_cuts[1:]),
            student_ranks=(*placement.teacher_ranks, *placement.student_ranks),
            teacher_cuts=(),
            teacher_ranks=(),
        )


@final
class Fanout(TrainingMode):
    """Heads on a trunk.

    Args:
        heads: The heads.
        trains: Whether they are trained: then features may be known, and heads may have stopped.
    """

    saves_lookahead: ClassVar[bool] = False  # a trunk that never changes runs again

    def __init__(self, heads: Heads, *, trains: bool = True) -> None:
        super().__init__()
        self.beside = {"student": heads}
        self.apart = heads.student
        self.rehearsing = heads.rehearsing
        # One head is enough to see what a step gives the trunk.
        self.prologue = partial(heads.student.trains, heads.student.names[:1], rehearses=True)
        self._heads = heads
        self._trains = trains
        self._cache = heads.cache if trains else None
        if self._cache is not None:
            self.see = self._cache.see

    @override
    def layout(self, captured: Captured, placement: Placement) -> Pipeline:
        trunk, outputs = captured.layouts(placement)["teacher"], range(len(self._heads.atoms))
        heads = NetworkLayout(placement.student_ranks, 1, 1, frozenset(outputs))
        data_rank, coupling = placement.data_rank, Coupling.FANOUT
        return Pipeline(placement.num_ranks, heads, trunk, data_rank, LOSS_RANK, coupling)

    @property
    @override
    def in_evaluation(self) -> TrainingMode:
        return Fanout(self._heads, trains=False)

    @override
    def handlers(self, losses: Losses) -> dict[Op, Handler]:
        def is_first(context: StepContext, action: Action) -> bool:
            pipeline = context.program.pipeline
            return action.stage == pipeline.stages_of(pipeline.student.ranks[action.stage])[0]

        def forward(context: StepContext, action: Action) -> bool:
            if is_first(context, action):
                if self._trains and not self._heads.student.trained:
                    # All of this rank's heads have stopped.
                    context.result = torch.zeros((), device=losses.device, requires_grad=True)
                else:
                    self._give_features(losses, context)
                    losses.run(context, action)
            return False

        def backward(context: StepContext, action: Action) -> bool:
            return is_first(context, action) and losses.run(context, action)

        # Losses are where the heads' forwards end.
        return {Op.FORWARD: forward, Op.LOSS: lambda *_: False, Op.BACKWARD: backward}

    def _give_features(self, losses: Losses, context: StepContext) -> None:
        """The features of a batch of which some were known."""
        known = self.known.get(context.index, NOTHING_KNOWN)
        if known.rows is not None:
            assert self._cache is not None
            values = values_of_teacher(losses.plan)
            made, units = values if known.rows else [], context.units[0]
            computed = [losses.stages.value(context.index, units, *value) for value in made]
            whole = self._cache.whole(known, computed, losses.device)
            losses.given = dict(zip(values, whole, strict=True))

    @override
    def reuses_inputs(self, plan: StepPlan) -> bool:
        # What a step does on this rank is what its replay does: one that trains no head has nothing
        # to do in it.
        return not plan.has_effects

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
