"""A plan: the decisions of the planner, and the step time and memory that it expects."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.lowering import lower
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.planning.memory import MemoryUse
from lightning_tspipe.planning.partition import megabytes
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.table import aligned
from lightning_tspipe.schedules.registry import build_schedule, runs_ahead
from lightning_tspipe.simulation.cost import CostTable, StageCost
from lightning_tspipe.simulation.simulator import simulate
from lightning_tspipe.simulation.timeline import Timeline

_BANDWIDTHS = ("bandwidth", "inter_node_bandwidth")


@dataclass(frozen=True)
class Plan:
    """The decisions that all ranks must agree on before the first step.

    Attributes:
        schedule: Name of the schedule.
        pipeline: Ranks of all stages.
        student_cuts: First atom of each stage, and the number of atoms.
        teacher_cuts: The same for the teacher; () without one.
        num_microbatches: Micro-batches per call.
        split: Student stages whose backward runs in two halves.
        costs: Costs that determine the order of the schedule.
        step_seconds: Simulated seconds per step, in the steady state.
        samples_per_second: Simulated throughput.
        bubble_ratio: Simulated share of the ranks' time in which they wait.
        memory_bytes: For each rank, bytes of state, saved activations and receive buffers.
        state_bytes: For each rank, bytes of parameters, gradients and optimizer state of both
            networks.
        reason: Why this plan was chosen.
        num_replicas: Number of data-parallel pipelines; numbers per rank are those of one pipeline,
            and ``samples_per_second`` counts the samples of all.
        speeds: Relative speed of each rank; () if all are equal.
        memory: Breakdown of the memory; None in a plan of an older version.
        recomputed: Atoms of the student that are recomputed in the backward.
    """

    schedule: str
    pipeline: Pipeline
    student_cuts: tuple[int, ...]
    teacher_cuts: tuple[int, ...]
    num_microbatches: int
    split: frozenset[int]
    costs: CostTable
    step_seconds: float
    samples_per_second: float
    bubble_ratio: float
    memory_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    reason: str
    num_replicas: int = 1
    speeds: tuple[float, ...] = ()
    memory: MemoryUse | None = None
    recomputed: tuple[int, ...] = ()

    @property
    def placement(self) -> Placement:
        """The placement that an engine carries out."""
        teacher = self.pipeline.teacher
        return Placement(
            num_ranks=self.pipeline.num_ranks,
            student_cuts=self.student_cuts,
            student_ranks=self.pipeline.student.ranks,
            teacher_cuts=self.teacher_cuts,
            teacher_ranks=() if teacher is None else teacher.ranks,
            num_microbatches=self.num_microbatches,
            split=self.split,
            recomputed=frozenset(self.recomputed),
        )

    def simulate(self, num_steps: int = 5) -> Timeline:
        """Simulate the first steps of a run: the pipeline fills, then it is in a steady state.

        Raises:
            ConfigurationError: Fewer than one step.
        """
        if num_steps < 1:
            raise ConfigurationError(f"{num_steps} steps to simulate: at least 1 is needed")
        ahead = self.pipeline.teacher is not None and runs_ahead(self.schedule)
        first, steady = (
            lower(
                build_schedule(
                    self.schedule,
                    self.pipeline,
                    self.costs,
                    teacher_now=teacher_now,
                    teacher_next=ahead,
                    split=self.split,
                )
            )
            for teacher_now in (True, not ahead)
        )
        return simulate([first, *[steady] * (num_steps - 1)], self.costs)

    def to_json(self) -> str:
        """Everything, as JSON that :meth:`from_json` reads."""
        data = asdict(self)
        data["split"] = sorted(self.split)
        data["pipeline"] = self.pipeline.to_dict()
        for name in _BANDWIDTHS:
            if math.isinf(data["costs"][name]):  # JSON has no infinity
                data["costs"][name] = None
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigurationError: The text is not a plan.
        """
        try:
            return cls._from(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"not a plan ({type(error).__name__}: {error}); `tspipe plan --save` writes one"
            ) from error

    @classmethod
    def _from(cls, data: dict[str, Any]) -> Plan:
        data["pipeline"] = Pipeline.from_dict(data["pipeline"])
        data["costs"] = _costs(data["costs"])
        data["split"] = frozenset(data["split"])
        for name in ("student_cuts", "teacher_cuts", "memory_bytes", "state_bytes"):
            data[name] = tuple(data[name])
        data["speeds"] = tuple(data.get("speeds", ()))
        data["recomputed"] = tuple(data.get("recomputed", ()))
        if data.get("memory") is not None:
            data["memory"] = MemoryUse(**{k: tuple(v) for k, v in data["memory"].items()})
        return cls(**data)

    def __str__(self) -> str:
        rows = [("rank", "student", "teacher", "busy", "state", "memory")]
        for rank in range(self.pipeline.num_ranks):
            busy = self._busy(rank) / self.step_seconds if self.step_seconds else 0.0
            rows.append(
                (
                    str(rank),
                    _held(self.pipeline.student, self.student_cuts, rank),
                    _held(self.pipeline.teacher, self.teacher_cuts, rank),
                    f"{busy:.0%}",
                    megabytes(self.state_bytes[rank]),
                    megabytes(self.memory_bytes[rank]),
                )
            )
        parts = [self._title(), *aligned(rows), *self._memory_lines(), self.reason]
        return "\n".join(parts + self._on_paper())

    def _memory_lines(self) -> list[str]:
        """Breakdown of the memory of each rank, as a table."""
        if self.memory is None:
            return []
        ranks = range(self.pipeline.num_ranks)
        rows = [("memory", *(name for name, _ in self.memory.of_rank(0)))]
        rows += [
            (str(rank), *(megabytes(size) for _, size in self.memory.of_rank(rank)))
            for rank in ranks
        ]
        return aligned(rows)

    def _on_paper(self) -> list[str]:
        """Notes on what the strategy does not check."""
        notes = []
        if self.speeds:
            speeds = ", ".join(f"{speed:g}" for speed in self.speeds)
            notes.append(
                f"a plan on paper: it expects ranks of speeds {speeds}, which TSPipeStrategy does "
                "not check"
            )
        return notes

    def _title(self) -> str:
        halves = f", backward in halves on stages {sorted(self.split)}" if self.split else ""
        if self.recomputed:
            halves += f", activations of {len(self.recomputed)} atoms recomputed"
        replicas = ""
        if self.num_replicas > 1:
            replicas = f" in {self.num_replicas} replicas of {self.pipeline.num_ranks} ranks"
        return (
            f"{self.schedule}{replicas}: {self.num_microbatches} micro-batch"
            f"{'' if self.num_microbatches == 1 else 'es'} per call{halves}; simulated "
            f"{self.step_seconds * 1e3:.1f} ms per step, {self.samples_per_second:.0f} samples/s, "
            f"bubble {self.bubble_ratio:.0%}"
        )

    def _busy(self, rank: int) -> float:
        """Seconds that ``rank`` is busy in a step."""
        student, costs = self.pipeline.student, self.costs
        seconds = costs.optimizer[rank] + costs.effects[rank]
        seconds += costs.loss * (rank in self.pipeline.loss_ranks)
        seconds += costs.data * (rank == self.pipeline.data_rank)
        for stage, cost in enumerate(costs.student):
            backward = cost.backward
            if stage in self.split:
                backward = cost.input_backward + cost.weight_backward
            seconds += (
                student.num_units * (cost.forward + backward) * (student.ranks[stage] == rank)
            )
        teacher = self.pipeline.teacher
        if teacher is not None:
            for stage, cost in enumerate(costs.teacher):
                seconds += teacher.num_units * cost.forward * (teacher.ranks[stage] == rank)
        return seconds


def _held(layout: NetworkLayout | None, cuts: tuple[int, ...], rank: int) -> str:
    """The stages of a rank and their atoms: ``0: atoms 0-11, 2: atoms 31-40``."""
    if layout is None:
        return "-"
    held = [
        f"{stage}: atoms {start}-{stop - 1}"
        for stage, (start, stop) in enumerate(pairwise(cuts))
        if layout.ranks[stage] == rank
    ]
    return ", ".join(held) or "-"


def _costs(data: dict[str, Any]) -> CostTable:
    values = dict(data)
    for name in ("student", "teacher"):
        values[name] = tuple(StageCost(**stage) for stage in data[name])
    for name in ("optimizer", "effects", "nodes", "reduction"):
        values[name] = tuple(data.get(name, ()))
    for name in _BANDWIDTHS:
        if name in values and values[name] is None:
            values[name] = math.inf
    return CostTable(**values)
