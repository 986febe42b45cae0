"""A chain: a student, and with it a teacher or none, whose outputs one loss reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, final

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.capture.plan import NetworkName, StepPlan
from lightning_tspipe.heads.student import StudentFanout
from lightning_tspipe.ir.action import Op
from lightning_tspipe.ir.pipeline import LOSS_RANK, Coupling, NetworkLayout, Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.batches.metadata import NOTHING_KNOWN, Known, StepHeader
from lightning_tspipe.runtime.execution.executor import Handler
from lightning_tspipe.runtime.execution.losses import Losses
from lightning_tspipe.runtime.execution.mode import TrainingMode
from lightning_tspipe.runtime.execution.pace import Pace
from lightning_tspipe.runtime.stages.captured import Captured, Division, Held
from lightning_tspipe.runtime.stages.frozen import FrozenPart
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.schedules.gpipe import gpipe


class OneStep(TrainingMode):
    """What is the same wherever ranks don't run steps of their own, and nothing is known before."""

    has_fixed_teacher: ClassVar[bool] = False
    saves_lookahead: ClassVar[bool] = True

    @property
    @override
    def beside(self) -> Mapping[NetworkName, Held]:
        return {}

    @property
    @override
    def apart(self) -> StudentFanout | None:
        return None

    @property
    @override
    def in_evaluation(self) -> TrainingMode:
        return Chain()

    @override
    def forwards(self, pipeline: Pipeline) -> Schedule:
        return gpipe(pipeline)

    @override
    def rehearsing(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def prologue(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def handlers(self, losses: Losses) -> dict[Op, Handler]:
        return {Op.LOSS: losses.run}

    @override
    def reuses_inputs(self, plan: StepPlan) -> bool:
        return False

    @override
    def pace(self, transport: Transport, pipeline: Pipeline, placement: Placement) -> Pace | None:
        return None

    @override
    def begin(self, rank: int, pipeline: Pipeline) -> None:
        pass

    @override
    def begin_epoch(self, transport: Transport, pipeline: Pipeline) -> None:
        pass

    @override
    def end(self) -> None:
        pass

    @override
    def whole(self, division: Division) -> Division:
        return division

    @override
    def see(self, batch: Any, inputs: Sequence[Tensor]) -> Known:
        return NOTHING_KNOWN

    @override
    def expect(self, headers: Mapping[int, StepHeader]) -> None:
        pass


@final
class Chain(OneStep):
    """A student, and perhaps a teacher beside it."""

    @override
    def layout(self, captured: Captured, division: Division) -> Pipeline:
        return _pipeline(captured, division, Coupling.CHAIN)


@final
class Prefix(OneStep):
    """A student whose first atoms are frozen, and run where a teacher would.

    Args:
        part: The frozen atoms.
    """

    saves_lookahead: ClassVar[bool] = False  # whoever goes on gets the same from the same weights

    def __init__(self, part: FrozenPart) -> None:
        self._part = part

    @override
    def layout(self, captured: Captured, division: Division) -> Pipeline:
        return _pipeline(captured, division, Coupling.PREFIX)

    @override
    def whole(self, division: Division) -> Division:
        cuts, ranks = division.cuts, division.ranks
        return replace(
            division,
            cuts={"student": (*cuts["teacher"], *cuts["student"][1:])},
            ranks={"student": (*ranks["teacher"], *ranks["student"])},
        )

    @override
    def see(self, batch: Any, inputs: Sequence[Tensor]) -> Known:
        front = self._part.front
        return NOTHING_KNOWN if front is None else Known(samples=front.see(batch, inputs))

    @override
    def expect(self, headers: Mapping[int, StepHeader]) -> None:
        if self._part.front is not None:
            self._part.front.expect({n: header.known.samples for n, header in headers.items()})


def _pipeline(captured: Captured, division: Division, coupling: Coupling) -> Pipeline:
    layouts, num_ranks = division.layouts(captured), division.num_ranks
    # An evaluation may call the teacher only.
    nothing = NetworkLayout(division.ranks["student"], 0, division.num_microbatches, frozenset())
    student, teacher = layouts.get("student", nothing), layouts.get("teacher")
    return Pipeline(num_ranks, student, teacher, num_ranks - 1, LOSS_RANK, coupling)
