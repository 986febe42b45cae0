"""Which rank holds which stage, and how many units flow: what a schedule is made for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op


@dataclass(frozen=True, slots=True)
class NetworkLayout:
    """One network cut into stages.

    Attributes:
        ranks: For each stage, the rank (position within the pipeline) that holds it. A rank may
            hold several stages.
        num_calls: Calls per step (views).
        num_microbatches: Micro-batches per call.
        output_stages: Stages that send something to the loss; the last stage always does.
    """

    ranks: tuple[int, ...]
    num_calls: int
    num_microbatches: int
    output_stages: frozenset[int]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def num_units(self) -> int:
        """Units that flow through every stage in one step."""
        return self.num_calls * self.num_microbatches

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NetworkLayout:
        """Read a network of what :meth:`Pipeline.to_dict` wrote."""
        ranks, outputs = tuple(data["ranks"]), frozenset(data["output_stages"])
        return cls(ranks, data["num_calls"], data["num_microbatches"], outputs)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The whole pipeline of one replica.

    Attributes:
        num_ranks: Ranks in the pipeline.
        student: The trainable network.
        teacher: The forward-only network, or None.
        data_rank: The rank that reads the data.
        loss_rank: The rank that runs the rest of the step; always rank 0 of the replica.
    """

    num_ranks: int
    student: NetworkLayout
    teacher: NetworkLayout | None
    data_rank: int
    loss_rank: int = 0

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
        if action.op.is_rank_wide:
            return action.stage
        return self.layout(action.op).ranks[action.stage]

    def to_dict(self) -> dict[str, Any]:
        """Everything, in what JSON knows."""
        data = asdict(self)
        for name in ("student", "teacher"):
            if data[name] is not None:
                data[name]["output_stages"] = sorted(data[name]["output_stages"])
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Pipeline:
        """Read what :meth:`to_dict` wrote.

        Raises:
            KeyError: Something is missing.
        """
        teacher = data["teacher"]
        return cls(
            data["num_ranks"],
            NetworkLayout.from_dict(data["student"]),
            None if teacher is None else NetworkLayout.from_dict(teacher),
            data["data_rank"],
            data["loss_rank"],
        )
