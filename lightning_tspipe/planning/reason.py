"""Conversion of the search's result into a plan, with the reasons for it."""

from __future__ import annotations

from lightning_tspipe.planning.constraints import Constraints
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.plan import Plan

TIE = 1.01
"""Times this close count as equal; then fewer micro-batches, stages and halves are preferred."""


def as_plan(
    layout: Layout, seconds: float, constraints: Constraints, *, num_simulated: int, num_equal: int
) -> Plan:
    """Make a plan of the chosen layout.

    Args:
        layout: The layout.
        seconds: Seconds of its steady step, simulated with the schedule that will run.
        constraints: Decisions of the user.
        num_simulated: Number of simulations in the search.
        num_equal: Number of layouts that are as fast, including this one.
    """
    busy, workload = layout.busy, layout.workload
    samples = max(workload.batch_sizes) * workload.num_replicas
    speeds = workload.ranks.speeds
    return Plan(
        schedule=constraints.schedule,
        pipeline=layout.pipeline,
        student_cuts=layout.cuts.student,
        teacher_cuts=layout.teacher_cuts,
        num_microbatches=layout.num_microbatches,
        split=layout.split,
        costs=layout.costs,
        step_seconds=seconds,
        samples_per_second=samples / seconds if seconds else 0.0,
        bubble_ratio=max(0.0, 1 - sum(busy) / (len(busy) * seconds)) if seconds else 0.0,
        memory_bytes=layout.memory_bytes,
        state_bytes=layout.state_bytes,
        reason="; ".join(_reasons(layout, seconds, constraints, num_simulated, num_equal)),
        num_replicas=workload.num_replicas,
        speeds=() if len(set(speeds)) == 1 else speeds,
        memory=layout.memory_use,
        recomputed=tuple(sorted(workload.student.recomputed)),
    )


def _reasons(
    layout: Layout, seconds: float, constraints: Constraints, num_simulated: int, num_equal: int
) -> list[str]:
    share = max(layout.busy) / seconds if seconds else 1.0
    found = [
        f"fastest of {num_simulated} simulations: the busiest rank works {share:.0%} of the step"
    ]
    if num_equal > 1:
        found.append(f"the simplest of {num_equal} that are equally fast, within {TIE - 1:.0%}")
    if layout.cuts.num_stages > layout.workload.num_ranks and constraints.partition == "auto":
        found.append("stages are folded over the ranks, which makes them fit or more even")
    if layout.reduction:
        longest = max(layout.reduction) * 1e3
        found.append(f"summing gradients over the replicas takes up to {longest:.1f} ms")
    smallest, largest = layout.workload.measured_sizes
    size = min(layout.workload.batch_sizes) // layout.num_microbatches
    if not smallest <= size <= largest:
        found.append(
            f"units of {size} samples are extrapolated from those that were measured, of "
            f"{smallest} to {largest}"
        )
    return found
