"""Costs of the actions and messages of a pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Message


@dataclass(frozen=True)
class StageCost:
    """Costs of one stage, for one unit.

    Attributes:
        forward: Seconds of a forward.
        backward: Seconds of a whole backward; 0 for a teacher.
        input_backward: Seconds of the half that computes the gradients of the stage's input.
        weight_backward: Seconds of the half that computes the gradients of its weights. The halves
            together may take longer than the whole.
        output_bytes: Bytes of the activation sent to the next stage; its gradient is as large.
        result_bytes: Bytes sent to the loss, if the stage is an output stage.
    """

    forward: float
    backward: float = 0.0
    input_backward: float = 0.0
    weight_backward: float = 0.0
    output_bytes: int = 0
    result_bytes: int = 0


@dataclass(frozen=True)
class CostTable:
    """Costs of a whole pipeline. Times are in seconds.

    Attributes:
        student: One entry per student stage.
        teacher: One entry per teacher stage; empty without a teacher.
        loss: The loss of the whole batch.
        optimizer: Optimizer step, one entry per rank.
        effects: Effects of the step, one entry per rank.
        latency: From the end of sending a message to its arrival.
        bandwidth: Bytes per second between two ranks, in each direction: each pair of ranks has a
            link of its own.
        data: Reading one batch on the data rank, and any prologue.
        input_bytes: Bytes of one unit's call input, if stage 0 is not on the data rank.
        batch_bytes: Bytes of the batch fields sent to the loss.
        nodes: One entry per rank: ranks with different numbers are on different nodes, and
            messages between them take the inter-node link; () if all are on one node.
        inter_node_latency: As ``latency``, between nodes.
        inter_node_bandwidth: As ``bandwidth``, between nodes.
        reduction: One entry per rank: seconds to sum its gradients over the replicas of the
            pipeline; () without replicas.
    """

    student: tuple[StageCost, ...]
    teacher: tuple[StageCost, ...]
    loss: float
    optimizer: tuple[float, ...]
    effects: tuple[float, ...]
    latency: float = 0.0
    bandwidth: float = math.inf
    data: float = 0.0
    input_bytes: int = 0
    batch_bytes: int = 0
    nodes: tuple[int, ...] = ()
    inter_node_latency: float = 0.0
    inter_node_bandwidth: float = math.inf
    reduction: tuple[float, ...] = ()

    @classmethod
    def uniform(cls, pipeline: Pipeline) -> CostTable:
        """Stages that cost the same, backwards of two forwards, and all else for nothing."""
        teacher, nothing = pipeline.teacher, (0.0,) * pipeline.num_ranks
        return cls(
            student=(StageCost(1.0, 2.0, 1.0, 1.0),) * pipeline.student.num_stages,
            teacher=() if teacher is None else (StageCost(1.0),) * teacher.num_stages,
            loss=0.0,
            optimizer=nothing,
            effects=nothing,
        )

    def check(self, pipeline: Pipeline) -> None:
        """Refuse a table made for another pipeline.

        Raises:
            ScheduleError: The number of stages or ranks differs.
        """
        num_ranks, teacher = pipeline.num_ranks, pipeline.teacher
        for name, number, expected in (
            ("student stages", len(self.student), pipeline.student.num_stages),
            ("teacher stages", len(self.teacher), teacher.num_stages if teacher else 0),
            ("optimizer ranks", len(self.optimizer), num_ranks),
            ("effects ranks", len(self.effects), num_ranks),
            ("ranks' nodes", len(self.nodes) or num_ranks, num_ranks),
            ("reduction ranks", len(self.reduction) or num_ranks, num_ranks),
        ):
            if number != expected:
                raise ScheduleError(f"costs for {number} {name}; the pipeline has {expected}")

    def seconds(self, action: Action) -> float:
        """Seconds that ``action`` takes."""
        if action.op in {Op.DATA, Op.PROLOGUE}:
            return self.data
        if action.op is Op.LOSS:
            return self.loss
        if action.op.is_rank_wide:
            costs = self.effects if action.op is Op.EFFECTS else self.optimizer
            return costs[action.stage]
        return float(getattr(self._stage(action), _FIELDS[action.op]))

    def message_bytes(self, message: Message) -> int:
        """Size of ``message`` in bytes."""
        producer, consumer = message.producer, message.consumer
        match message.payload:
            case "input":
                return self.input_bytes
            case "batch":
                return self.batch_bytes
            case "output":
                return self._stage(producer).result_bytes
            case "gradient":
                # A gradient has the size of the forward's payload between the same two stages.
                stage = self.student[consumer.stage]
                return stage.result_bytes if producer.op is Op.LOSS else stage.output_bytes
            case _:
                return self._stage(producer).output_bytes

    def link(self, source: int, target: int) -> tuple[float, float]:
        """Latency in seconds, and bytes per second, between two ranks."""
        if self.nodes and self.nodes[source] != self.nodes[target]:
            return self.inter_node_latency, self.inter_node_bandwidth
        return self.latency, self.bandwidth

    def _stage(self, action: Action) -> StageCost:
        network = self.teacher if action.op is Op.TEACHER else self.student
        return network[action.stage]


_FIELDS = {
    Op.FORWARD: "forward",
    Op.TEACHER: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_BACKWARD: "input_backward",
    Op.WEIGHT_BACKWARD: "weight_backward",
}
