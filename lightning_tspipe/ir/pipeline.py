"""The pipeline that a schedule is made for: ranks, stages and units."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op

LOSS_RANK = 0
"""The rank that computes the losses of a chain, logs and saves."""


class Coupling(Enum):
    """Inputs and losses of the student's stages; the value is the coupling's name.

    - ``CHAIN``: each stage reads the one before it, and one loss reads all outputs.
    - ``FANOUT``: every stage is a head of its own, which reads the teacher's output.
    - ``BLOCKWISE``: stage s reads the input of the teacher's stage s, which is on the same ranks,
      and learns its output.
    - ``PREFIX``: a chain that begins with the teacher, which is the student's frozen prefix.

    In fan-out and blockwise, stages don't depend on each other: every rank has its own loss.
    """

    CHAIN = "chain"
    FANOUT = "fanout"
    BLOCKWISE = "blockwise"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class NetworkLayout:
    """One network cut into stages.

    Attributes:
        ranks: Rank (position within the pipeline) of each stage. A rank may hold several stages.
        num_calls: Calls per step (views).
        num_microbatches: Micro-batches per call.
        output_stages: Stages that send something to the loss; the last stage always does.
        groups: If stages are shared: for each stage the ranks that divide each batch (see
            ``shares``); a unit of a stage is then one rank's share.
    """

    ranks: tuple[int, ...]
    num_calls: int
    num_microbatches: int
    output_stages: frozenset[int]
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def num_units(self) -> int:
        """Units that flow through every stage in one step."""
        return self.num_calls * self.num_microbatches

    def units_of(self, stage: int) -> range:
        """The units of one stage: those of all stages, or the shares of the batch."""
        return range(len(self.groups[stage]) if self.groups else self.num_units)

    def holder(self, stage: int, unit: int) -> int:
        """The rank that runs a unit of a stage."""
        return self.groups[stage][unit] if self.groups else self.ranks[stage]

    def holders(self, stage: int) -> tuple[int, ...]:
        """All ranks that hold a stage."""
        return self.groups[stage] if self.groups else (self.ranks[stage],)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The whole pipeline of one replica.

    Attributes:
        num_ranks: Ranks in the pipeline.
        student: The trainable network.
        teacher: The forward-only network, or None.
        data_rank: The rank that reads the data.
        loss_rank: The rank that runs the rest of the step; always rank 0 of the replica.
        coupling: Inputs of the student's stages.
        is_relayed: If blockwise, whether a stage reads the output that the one before it relays;
            otherwise each stage runs the teacher from its first block, on the batch.
        is_fed: Whether inputs of a chain's student are made of the teacher's outputs.

    Raises:
        ScheduleError: The networks can't be coupled this way.
    """

    num_ranks: int
    student: NetworkLayout
    teacher: NetworkLayout | None
    data_rank: int
    loss_rank: int = 0
    coupling: Coupling = Coupling.CHAIN
    is_relayed: bool = True
    is_fed: bool = False

    def __post_init__(self) -> None:
        if self.coupling is Coupling.CHAIN:
            return
        if self.teacher is None:
            raise ScheduleError(f"a {self.coupling.value} pipeline without a teacher")
        num_units = self.teacher.num_units
        if self.coupling is Coupling.PREFIX and num_units != self.student.num_units:
            raise ScheduleError(
                f"the frozen part has {num_units} units and the rest of the student "
                f"{self.student.num_units}: they must have equally many"
            )

    @property
    def is_chain(self) -> bool:
        """Whether the stages of the student read each other, so that one loss is for all."""
        return self.coupling in {Coupling.CHAIN, Coupling.PREFIX}

    @property
    def loss_ranks(self) -> tuple[int, ...]:
        """The ranks that compute a loss: of all outputs, or of their own stages."""
        if self.is_chain:
            return (self.loss_rank,)
        stages = range(self.student.num_stages)
        return tuple(sorted({rank for stage in stages for rank in self.student.holders(stage)}))

    def readers(self, op: Op) -> tuple[int, ...]:
        """The ranks that read what the last stage of a network gives, and its taps."""
        is_read = op is Op.TEACHER and self.is_fed
        return (*self.loss_ranks, self.data_rank) if is_read else self.loss_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The student's stages on a rank."""
        stages = range(self.student.num_stages)
        return tuple(stage for stage in stages if rank in self.student.holders(stage))

    def layout(self, op: Op) -> NetworkLayout:
        """The layout of the network that ``op`` works on.

        Raises:
            ScheduleError: A teacher action in a pipeline without a teacher.
        """
        if op is not Op.TEACHER:
            return self.student
        if self.teacher is None:
            raise ScheduleError("a teacher action in a pipeline without a teacher")
        return self.teacher

    def rank_of(self, action: Action) -> int:
        """The rank that runs ``action``."""
        if action.unit is None:
            return action.stage
        return self.layout(action.op).holder(action.stage, action.unit)
