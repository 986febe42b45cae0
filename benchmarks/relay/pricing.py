"""The paper's workloads, priced, planned and made as slow as this machine can follow."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from benchmarks.relay.decoding import measured_rates
from benchmarks.relay.papers import (
    BATCH_SIZE,
    EMULATED_RATES,
    NUM_DEVICES,
    PAPERS,
    SLOWEST_RATES,
    even_profile,
    profile,
    scaled,
)
from benchmarks.relay.simulated import chosen_over_best
from lightning_tspipe.planning.relay import RelayPlan, RelayProfile, plan_mode


def priced(step_seconds: float) -> dict[str, Any]:
    """All of them, in what JSON knows.

    Args:
        step_seconds: What a relayed step shall take.
    """
    rates = {"slowest": SLOWEST_RATES, "measured": measured_rates()}
    even = even_profile()
    found: dict[str, Any] = {
        "rates": rates,
        "even": _run(even, plan_mode("ahd", even, NUM_DEVICES), 0.0, step_seconds),
        "papers": [],
    }
    for paper in PAPERS:
        costs = profile(paper)
        plan, shared = (plan_mode(mode, costs, NUM_DEVICES) for mode in ("ahd", "dp"))
        loads = {name: BATCH_SIZE / rate[paper.dataset] for name, rate in rates.items()}
        loads |= {"emulated": BATCH_SIZE / EMULATED_RATES[paper.dataset], "none": 0.0}
        found["papers"].append(
            {
                "name": paper.name,
                "paper": paper.over_dp,
                "simulated": {
                    name: _data_parallel(shared, costs, load) / max(load, plan.step_seconds)
                    for name, load in loads.items()
                },
                "runs": {
                    name: _run(costs, plan, loads[name], step_seconds)
                    for name in ("emulated", "none")
                },
                "chosen_over_best": chosen_over_best(costs, NUM_DEVICES),
            }
        )
    return found


def _run(
    profile: RelayProfile, plan: RelayPlan, load: float, step_seconds: float
) -> dict[str, Any]:
    """What processes that sleep need to know, at the speed at which a step takes so long."""
    slower = step_seconds / max(plan.step_seconds, load)
    costs = scaled(profile, slower)
    return {
        "batch_size": costs.batch_size,
        "profile": _written(costs),
        "load": slower * load,
        "partition": " ".join(str(b - a) for a, b in pairwise(plan.cuts)),
        "widths": " ".join(map(str, plan.widths)),
        "work": _work(plan, costs),
        "planned_utilization": _work(plan, costs) / (NUM_DEVICES * step_seconds),
    }


def _written(costs: RelayProfile) -> str:
    return json.dumps(
        [
            {"name": b.name, "teacher": dict(b.teacher), "student": dict(b.student)}
            for b in costs.blocks
        ]
    )


def _data_parallel(plan: RelayPlan, costs: RelayProfile, load: float) -> float:
    """Seconds per batch: each block reads it again, beside the computation."""
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
