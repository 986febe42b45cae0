"""A plan: the decisions of the planner, and the step time and memory that it expects.

Checkpoints keep plans as text, so that a resumed run can follow them. The placement determines more
than the step time: in asynchronous schedules, a stage's place decides which version of its weights
it reads; a micro-batch has the batch statistics of its own samples; and dropout draws from the
generator of the rank that runs it. Measured costs differ from run to run, and so may plans that are
made from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_tspipe.errors import CheckpointError, ConfigurationError
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.plain import Saved, from_plain, to_plain
from lightning_tspipe.planning.bounds import busy_seconds
from lightning_tspipe.planning.layout import Layout, MemoryUse
from lightning_tspipe.planning.placement import Cuts, Placement
from lightning_tspipe.planning.relay import RelayPlan
from lightning_tspipe.planning.table import aligned, megabytes
from lightning_tspipe.schedules.registry import ASYNCHRONOUS, build_step, steady_step
from lightning_tspipe.schedules.window_steps import Durations, When, steady_window
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.simulation.simulator import STEADY_STEPS, simulate
from lightning_tspipe.simulation.timeline import Timeline

Source = Literal["times", "flops", "given"]
"""The basis of a plan: measured times, counted operations, or the user's partition."""

PLAN, PLACED = "plan", "placed"
"""Keys in a checkpoint: the planner's result, if it searched; and what was carried out."""


@dataclass(frozen=True)
class Plan(Saved):
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
        window: Batches that are all in the pipeline between two updates; 0: other schedules.
        teacher_runs: When a teacher does so in windows, as in a workload.
    """

    schedule: str
    pipeline: Pipeline
    student_cuts: Cuts
    teacher_cuts: Cuts
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
    window: int = 0
    teacher_runs: When = "now"
    _origin = "plan", "`tspipe plan --save` writes one"

    @classmethod
    def of(cls, layout: Layout, seconds: float, reason: str) -> Plan:
        """Make a plan of a layout.

        Args:
            layout: The layout.
            seconds: Seconds of its steady step, simulated with the schedule that will run.
            reason: Why it was chosen.
        """
        busy, workload = layout.busy, layout.workload
        samples, speeds = max(workload.batch_sizes), workload.ranks.speeds
        return cls(
            schedule=workload.schedule,
            pipeline=layout.pipeline,
            student_cuts=layout.student_cuts,
            teacher_cuts=layout.teacher_cuts,
            num_microbatches=layout.num_microbatches,
            split=layout.split,
            costs=layout.costs,
            step_seconds=seconds,
            samples_per_second=samples * workload.num_replicas / seconds if seconds else 0.0,
            bubble_ratio=max(0.0, 1 - sum(busy) / (len(busy) * seconds)) if seconds else 0.0,
            memory_bytes=layout.memory_bytes,
            state_bytes=layout.state_bytes,
            reason=reason,
            num_replicas=workload.num_replicas,
            speeds=() if len(set(speeds)) == 1 else speeds,
            memory=layout.memory,
            recomputed=tuple(sorted(workload.student.recomputed)),
            window=workload.window,
            teacher_runs=workload.teacher_runs,
        )

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
            data_rank=self.pipeline.data_rank,
        )

    def simulate(self, num_steps: int = 5) -> Timeline:
        """Simulate the first steps of a run: the pipeline fills, then it is in a steady state.

        Of windows whole ones, with at least so many batches.

        Raises:
            ConfigurationError: Fewer than one step.
        """
        if num_steps < 1:
            raise ConfigurationError(f"{num_steps} steps to simulate: at least 1 is needed")
        name, pipeline, costs, split = self.schedule, self.pipeline, self.costs, self.split
        if self.window:
            durations = Durations.of(name, pipeline, costs)
            whole = steady_window(name, pipeline, self.window, self.teacher_runs, durations, split)
            return simulate([whole] * math.ceil(num_steps / self.window), costs)
        first = steady = steady_step(name, pipeline, costs, split)
        if name != ASYNCHRONOUS:
            first = build_step(name, pipeline, costs, fresh=True, ahead=1, split=split)
        return simulate([first, *[steady] * (num_steps - 1)], costs)

    def simulate_recording(self, num_steps: int = 3) -> Timeline:
        """Simulate what a recording of a run would show: steps of a pipeline that is full.

        Args:
            num_steps: Number of steps, at least 3; the first and the last only frame the others.
        """
        last = STEADY_STEPS + max(3, num_steps) - 1
        return self.simulate(last + 1).between(STEADY_STEPS, last)

    def rows(self) -> list[tuple[str, ...]]:
        """The plan as a table: a row of headings, then one for each rank."""
        per_update = max(1, self.window)
        busy = busy_seconds(self.pipeline, self.costs, self.split, per_update)
        return [
            ("rank", "student", "teacher", "busy", "state", "memory"),
            *(
                (
                    str(rank),
                    _held(self.pipeline.student, self.student_cuts, rank),
                    _held(self.pipeline.teacher, self.teacher_cuts, rank),
                    f"{busy[rank] / self.step_seconds if self.step_seconds else 0.0:.0%}",
                    megabytes(self.state_bytes[rank]),
                    megabytes(self.memory_bytes[rank]),
                )
                for rank in range(self.pipeline.num_ranks)
            ),
        ]

    def __str__(self) -> str:
        ranks = range(self.pipeline.num_ranks)
        lines = [self._title(), *aligned(self.rows())]
        if self.memory is not None:
            uses = [dict(self.memory.of_rank(rank)) for rank in ranks]
            table = [(str(rank), *map(megabytes, use.values())) for rank, use in enumerate(uses)]
            lines += aligned([("memory", *uses[0]), *table])
        lines.append(self.reason)
        if self.speeds:
            speeds = ", ".join(f"{speed:g}" for speed in self.speeds)
            lines.append(
                f"the plan assumes devices of relative speeds {speeds}, which TSPipeStrategy does "
                "not check"
            )
        return "\n".join(lines)

    def _title(self) -> str:
        halves = f", backward in halves on stages {sorted(self.split)}" if self.split else ""
        if self.recomputed:
            halves += f", activations of {len(self.recomputed)} atoms recomputed"
        replicas = ""
        if self.num_replicas > 1:
            replicas = f" in {self.num_replicas} replicas of {self.pipeline.num_ranks} ranks"
        windows = f" in windows of {self.window} batches" if self.window else ""
        return (
            f"{self.schedule}{windows}{replicas}: {self.num_microbatches} micro-batch"
            f"{'' if self.num_microbatches == 1 else 'es'} per call{halves}; simulated "
            f"{self.step_seconds * 1e3:.1f} ms per step, {self.samples_per_second:.0f} samples/s, "
            f"bubble {self.bubble_ratio:.0%}"
        )


def _held(layout: NetworkLayout | None, cuts: Cuts, rank: int) -> str:
    """The stages of a rank and their atoms: ``0: atoms 0-11, 2-3: atoms 31-40``."""
    if layout is None:
        return "-"
    held = [stage for stage, holder in enumerate(layout.ranks) if holder == rank]
    runs: list[list[int]] = []
    for stage in held:
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return (
        ", ".join(
            f"{'-'.join(map(str, dict.fromkeys((run[0], run[-1]))))}: "
            f"atoms {cuts[run[0]]}-{cuts[run[-1] + 1] - 1}"
            for run in runs
        )
        or "-"
    )


@dataclass(frozen=True)
class RunPlan:
    """The placement of a run, and the conditions that it was made for.

    Attributes:
        made_for: By name, what another run must have in common with this one to use its plan:
            numbers of devices and atoms, and the user's options. Plain values.
        source: The basis of the plan.
        placement: The placement that an engine carries out; None if blocks are relayed.
        plan: The planner's result, with the costs that order actions; None if nothing was searched.
        blocks: The distribution of blocks, if they are relayed.
    """

    made_for: Mapping[str, Any]
    source: Source
    placement: Placement | None = None
    plan: Plan | None = None
    blocks: RelayPlan | None = None

    @property
    def costs(self) -> CostTable | None:
        """Costs of the stages, which determine the order of actions."""
        return None if self.plan is None else self.plan.costs

    @property
    def table(self) -> str:
        """Which rank has which stages, as lines of text."""
        if self.blocks is not None:
            return str(self.blocks)
        placed = self.placement
        if placed is None:
            return ""
        networks = (
            ("student", placed.student_cuts, placed.student_ranks),
            ("teacher", placed.teacher_cuts, placed.teacher_ranks),
        )
        rows = [("network", "stage", "atoms", "rank")]
        for name, cuts, ranks in networks:
            for stage, rank in enumerate(ranks):
                atoms = f"{cuts[stage]}-{cuts[stage + 1] - 1}"
                rows.append((name, str(stage), atoms, str(rank)))
        return "\n".join(aligned(rows))

    def carries_out(self, other: RunPlan) -> bool:
        """Whether another plan has the same placement, and the same order of actions."""
        mine, others = (self.placement, self.blocks), (other.placement, other.blocks)
        return mine == others and self.costs == other.costs

    def differences(self, wanted: Mapping[str, Any]) -> list[str]:
        """The differences between another run and this one, in words.

        Args:
            wanted: The other run's conditions, as in :attr:`made_for`.

        >>> RunPlan({"devices": 4, "schedule": "tspipe"}, "times").differences({"devices": 2})
        ['devices (4 then, 2 now)', "schedule ('tspipe' then, None now)"]
        """
        names = dict.fromkeys([*self.made_for, *wanted])
        pairs = [(name, self.made_for.get(name), wanted.get(name)) for name in names]
        return [f"{name} ({then!r} then, {now!r} now)" for name, then, now in pairs if then != now]

    def to_entries(self) -> dict[str, str | None]:
        """Texts for a checkpoint, by key; the first one is what ``tspipe plan`` saves."""
        plan = None if self.plan is None else self.plan.to_json()
        return {PLAN: plan, PLACED: json.dumps(to_plain(replace(self, plan=None)))}

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> RunPlan | None:
        """Read what :meth:`to_entries` returned; None for older versions, which stored no plan.

        Raises:
            CheckpointError: The texts are something else.
        """
        text, plan = entries.get(PLACED), entries.get(PLAN)
        if text is None:
            return None
        try:
            placed: RunPlan = from_plain(cls, json.loads(text))
            return replace(placed, plan=None if plan is None else Plan.from_json(plan))
        except (ValueError, KeyError, TypeError, ConfigurationError) as error:
            raise CheckpointError(
                f"the checkpoint's plan can't be read ({type(error).__name__}: {error}): it was "
                "changed, or written by a newer version. Remove "
                f"checkpoint['lightning_tspipe'][0][{PLACED!r}] to plan anew"
            ) from error
