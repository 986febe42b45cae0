"""A captured step on its ranks: the pipeline, and the programs of its steps."""

from __future__ import annotations

from lightning_tspipe.ir.lowering import Program, lower
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.schedules.registry import ASYNCHRONOUS, build_step, lookahead
from lightning_tspipe.simulation.cost import CostTable


class Programs:
    """The validated programs of a pipeline's steps; the same on all ranks.

    Args:
        pipeline: The pipeline.
        schedule: ``tspipe``, ``gpipe``, ``sequential`` or ``1f1b``; of heads, the first one runs
            their trunk ahead and the others don't.
        costs: Costs of the stages, for the order of actions; None for equal ones.
        split: Student stages whose backwards may run in two halves.
        depth: How far the trunk of heads runs ahead.

    Attributes:
        lookahead: For each rank, up to how many batches ahead its steps have to do with.
        announced: How many batches ahead the data rank tells of.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: str,
        costs: CostTable | None,
        split: frozenset[int],
        depth: int = 1,
    ) -> None:
        self._pipeline = pipeline
        self._schedule = schedule
        self._costs = costs or CostTable.uniform(pipeline)
        self._split = split
        self._known: dict[tuple[bool, int], Program] = {}
        self._depth = depth
        self.lookahead = lookahead(schedule, pipeline, depth)
        # A rank that waits for the data rank's word as deep as it looks itself would wait for the
        # end of its step.
        self.announced = max(self.lookahead) + (schedule == ASYNCHRONOUS and any(self.lookahead))

    @property
    def steps_early(self) -> int:
        """How many steps before another rank has to know of a batch the data rank tells of it."""
        return self.announced - min(self.lookahead)

    @property
    def tells_early(self) -> bool:
        """Whether that is any."""
        return self.steps_early > 0

    @property
    def fullest(self) -> Program:
        """The step of which all others are parts: nothing was done before, all may run ahead."""
        return self.of(fresh=True, ahead=max(self.lookahead))

    def of(self, *, fresh: bool, ahead: int) -> Program:
        """The program of a step.

        Args:
            fresh: Nothing of this batch has been done in a step before.
            ahead: How many of the batches that follow may be worked on.
        """
        key = (fresh, ahead)
        if key not in self._known:
            schedule = build_step(
                self._schedule,
                self._pipeline,
                self._costs,
                fresh=fresh,
                ahead=ahead,
                split=self._split,
                depth=self._depth,
            )
            program = lower(schedule)
            validate(program)
            self._known[key] = program
        return self._known[key]
