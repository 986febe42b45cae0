"""A captured step on its ranks: the pipeline, and the programs of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_tspipe.capture.plan import NetworkName, StepPlan
from lightning_tspipe.ir.lowering import Program, lower
from lightning_tspipe.ir.pipeline import LOSS_RANK, Coupling, NetworkLayout, Pipeline
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.schedules.registry import ASYNCHRONOUS, build_step, lookahead
from lightning_tspipe.simulation.cost import CostTable


@dataclass(frozen=True)
class Captured:
    """A step after the trace: the plan and the networks that it calls.

    Attributes:
        plan: The plan.
        networks: The networks whose calls go through the pipeline.
        heads: The heads of a fan-out, which the step calls where they are.
        followed: Of a teacher that the step doesn't call, the tensor of the student that each of
            its tensors follows, by dotted names.
    """

    plan: StepPlan
    networks: dict[NetworkName, ChainNetwork]
    heads: Heads | None = None
    followed: Mapping[str, str] = field(default_factory=dict)

    @property
    def held(self) -> dict[NetworkName, ChainNetwork | Heads]:
        """All that is divided among the ranks."""
        return {**self.networks, **({"student": self.heads} if self.heads is not None else {})}

    @property
    def is_frozen(self) -> bool:
        """Whether the student's first atoms run in the place of a teacher."""
        teacher = self.networks.get("teacher")
        return teacher is not None and teacher.called_as == "student"

    @property
    def whole(self) -> Captured:
        """The same with the frozen part in the student, where it comes from."""
        networks = {name: x for name, x in self.networks.items() if x.called_as == name}
        return replace(self, networks=networks)


def layout(
    captured: Captured,
    ranks: Mapping[NetworkName, tuple[int, ...]],
    cuts: Mapping[NetworkName, tuple[int, ...]],
    num_microbatches: int,
    num_ranks: int,
) -> Pipeline:
    """The pipeline of a captured step; the last rank reads the data.

    Args:
        captured: The step.
        ranks: The rank of each stage of each network.
        cuts: Their cuts.
        num_microbatches: Micro-batches per call.
        num_ranks: Ranks of the pipeline.
    """
    layouts = {
        name: NetworkLayout(
            ranks[name],
            len(captured.plan.calls_of(network.called_as)),
            num_microbatches,
            network.output_stages(cuts[name]),
        )
        for name, network in captured.networks.items()
    }
    if captured.heads is not None:
        heads = NetworkLayout(ranks["student"], 1, 1, frozenset(range(len(captured.heads.atoms))))
        return Pipeline(
            num_ranks, heads, layouts["teacher"], num_ranks - 1, LOSS_RANK, Coupling.FANOUT
        )
    # An evaluation may call the teacher only.
    no_student = NetworkLayout(ranks["student"], 0, num_microbatches, frozenset())
    student, teacher = layouts.get("student", no_student), layouts.get("teacher")
    coupling = Coupling.PREFIX if captured.is_frozen else Coupling.CHAIN
    return Pipeline(num_ranks, student, teacher, num_ranks - 1, LOSS_RANK, coupling)


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
