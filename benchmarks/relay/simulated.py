"""Distributions on paper: what the simulator says of each of them, beside what was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from lightning_tspipe.planning.relay import RelayPlan, RelayProfile, distribute
from lightning_tspipe.schedules.relay import relay, relay_pipeline
from lightning_tspipe.simulation.cost import CostTable, StageCost
from lightning_tspipe.simulation.simulator import steady_step_time


def distributions(num_blocks: int, num_devices: int) -> Iterator[RelayPlan]:
    """All ways to give contiguous blocks to contiguous devices.

    >>> sum(1 for _ in distributions(3, 2))
    3
    """
    for number in range(1, min(num_blocks, num_devices) + 1):
        inner = combinations(range(1, num_blocks), number - 1), range(1, num_devices)
        for cuts, ends in product(inner[0], combinations(inner[1], number - 1)):
            widths = tuple(stop - start for start, stop in pairwise((0, *ends, num_devices)))
            yield RelayPlan((0, *cuts, num_blocks), widths)


def step_seconds(plan: RelayPlan, profile: RelayProfile) -> float:
    """Seconds per step in the steady state, by the simulator."""
    pipeline = relay_pipeline(plan.ranks)
    students, teachers, reductions = [], [], [0.0] * plan.num_devices
    for (first, last), ranks in zip(pairwise(plan.cuts), plan.ranks, strict=True):
        share = -(-profile.batch_size // len(ranks))
        blocks = profile.blocks[first:last]
        student = sum(block.student[share] for block in blocks)
        relayed = (
            share * blocks[0].input_bytes / profile.bandwidth + profile.latency if first else 0
        )
        students.append(StageCost(student / 3, 2 * student / 3))
        # As the plan counts it: what is relayed to a stage keeps it busy.
        teachers.append(StageCost(relayed + sum(block.teacher[share] for block in blocks)))
        for rank in ranks:
            update = sum(block.update for block in blocks)
            reductions[rank] = profile.reduction_seconds(first, last, len(ranks)) + update
    zeros = (0.0,) * plan.num_devices
    costs = CostTable(tuple(students), tuple(teachers), 0.0, tuple(reductions), zeros)
    return steady_step_time(relay(pipeline), costs)


def chosen_over_best(profile: RelayProfile, num_devices: int) -> float:
    """Step time of the distribution that is chosen over that of the best of all."""
    chosen = step_seconds(distribute(profile, num_devices), profile)
    plans = distributions(len(profile.blocks), num_devices)
    return chosen / min(step_seconds(plan, profile) for plan in plans)
