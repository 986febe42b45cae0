"""Chains of stages, and what differs from them little: a frozen beginning, blocks beside blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, final

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.ir.pipeline import Coupling, Pipeline
from lightning_tspipe.runtime.batches.metadata import NOTHING_KNOWN, Known, StepHeader
from lightning_tspipe.runtime.execution.rank import TrainingMode
from lightning_tspipe.runtime.stages.captured import Captured, Division
from lightning_tspipe.runtime.stages.frozen import FrozenPart


@final
class Chain(TrainingMode):
    """A student, and perhaps a teacher beside it, whose outputs one loss reads."""


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
        self._part = part

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
        return NOTHING_KNOWN if front is None else front.see(batch, inputs)

    @override
    def expect(self, headers: Mapping[int, StepHeader]) -> None:
        if self._part.front is not None:
            self._part.front.expect({n: header.known for n, header in headers.items()})


@final
class Blockwise(TrainingMode):
    """Blocks on groups of ranks, each with a loss of its own; its steps are the relay's.

    An evaluation walks both networks from end to end, which then are a chain.

    Args:
        pipeline: Which ranks share which stage.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline

    @override
    def layout(self, captured: Captured, division: Division) -> Pipeline:
        return self._pipeline
