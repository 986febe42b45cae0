"""The paper's workloads, priced, planned and made as slow as this machine can follow."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from benchmarks.relay.papers import NUM_DEVICES, PAPERS, load_seconds, profile, scaled
from benchmarks.relay.simulated import chosen_over_best
from lightning_tspipe.planning.relay import RelayPlan, RelayProfile
from lightning_tspipe.planning.relay_modes import plan_mode, seconds_per_batch


def priced(step_seconds: float) -> list[dict[str, Any]]:
    """All of them, in what JSON knows.

    Args:
        step_seconds: What a relayed step shall take.
    """
    found = []
    for paper in PAPERS:
        real = profile(paper)
        plan = plan_mode("ahd", real, NUM_DEVICES)
        slower = step_seconds / max(plan.step_seconds, load_seconds(paper))
        costs, load = scaled(real, slower), slower * load_seconds(paper)
        shared = plan_mode("dp", costs, NUM_DEVICES)
        plan = plan_mode("ahd", costs, NUM_DEVICES)
        alone = {
            "ahd": seconds_per_batch("ahd", plan, costs),
            "dp": seconds_per_batch("dp", shared, costs),
        }
        found.append(
            {
                "name": paper.name,
                "paper": paper.over_dp,
                "batch_size": costs.batch_size,
                "profile": _written(costs),
                "load": load,
                "partition": " ".join(str(b - a) for a, b in pairwise(plan.cuts)),
                "widths": " ".join(map(str, plan.widths)),
                "planned": {"ahd": max(load, alone["ahd"]), "dp": _passes(shared, costs, load)},
                "without_loads": alone,
                "work": _work(plan, costs),
                "chosen_over_best": chosen_over_best(costs, NUM_DEVICES),
            }
        )
    return found


def _written(costs: RelayProfile) -> str:
    return json.dumps(
        [
            {"name": b.name, "teacher": dict(b.teacher), "student": dict(b.student)}
            for b in costs.blocks
        ]
    )


def _passes(plan: RelayPlan, costs: RelayProfile, load: float) -> float:
    """Data parallelism: each block reads the batch again, beside its computation."""
    share = -(-costs.batch_size // plan.num_devices)
    return sum(
        max(load, sum(b.teacher[share] for b in costs.blocks[: i + 1]) + block.student[share])
        for i, block in enumerate(costs.blocks)
    )


def _work(plan: RelayPlan, costs: RelayProfile) -> float:
    """Seconds that all devices compute in a step, without what they send."""
    total = 0.0
    for first, last, width in zip(plan.cuts, plan.cuts[1:], plan.widths, strict=False):
        share = -(-costs.batch_size // width)
        total += width * sum(block.seconds(share) for block in costs.blocks[first:last])
    return total
