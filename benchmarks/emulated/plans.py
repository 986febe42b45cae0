"""What is planned for one model: all methods, priced by the same floating-point operations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.emulated.world import ACTION_SECONDS, emulated, work_seconds
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.schedules.phases import teacher_only
from lightning_tspipe.simulation.simulator import StepGraph, graph_seconds

BATCH_SIZE = 256
LINK = (4e-4, 2e9)
"""Seconds of latency and bytes per second between two processes of this machine."""
METHODS = ("tspipe", "gpipe", "gpipe_joined", "sequential")
"""In ``gpipe`` each network passes the pipeline on its own, as when a library is called for one and
then for the other; in ``gpipe_joined`` the student follows right behind the teacher."""
GPIPE_UNITS = 8
"""Micro-batches of GPipe per pass, over all views: as the paper has it, u = 8."""


@dataclass(frozen=True)
class Prepared:
    """Plans for one model on a number of devices; plain data, so that it travels.

    Attributes:
        work: Seconds of one device for a whole step.
        plans: By method, as JSON.
        simulated: Seconds per step by method.
    """

    work: float
    plans: dict[str, str]
    simulated: dict[str, float]


def prepare(name: str, num_devices: int, step_seconds: float, fraction: float) -> Prepared:
    """Price and plan; in a process of its own, since pricing loads torch.

    Args:
        name: Of the row.
        num_devices: Emulated devices.
        step_seconds: What a step takes if no device ever waits.
        fraction: Of the real bytes that travel.
    """
    from benchmarks.emulated.papers import profile  # noqa: PLC0415 -- loads torch

    step = emulated(profile(name, BATCH_SIZE), step_seconds * num_devices, fraction)
    plans = {method: plan_of(step, num_devices, method) for method in METHODS}
    return Prepared(
        work_seconds(step),
        {method: plan.to_json() for method, plan in plans.items()},
        {method: simulated_seconds(plan, method) for method, plan in plans.items()},
    )


def plan_of(profile: StepProfile, num_devices: int, method: str) -> Plan:
    """The best plan of a method; the others have one stage per device, as in their papers."""
    num_views = profile.num_calls[0]
    counts = {
        "tspipe": [num_devices, 2 * num_devices],
        "sequential": [1],
    }
    plans = (
        profile.plan(
            num_devices,
            schedule=method.removesuffix("_joined"),
            num_microbatches=count,
            num_stages=None if method == "tspipe" else num_devices,
            link=LINK,
            action_overhead=ACTION_SECONDS,
        )
        for count in counts.get(method, [GPIPE_UNITS // num_views])
    )
    return min(plans, key=lambda plan: plan.step_seconds)


def simulated_seconds(plan: Plan, method: str) -> float:
    """Seconds per step: as planned, or of both passes one after the other."""
    if method != "gpipe":
        return plan.step_seconds
    pipeline = plan.pipeline
    student = gpipe(replace(pipeline, teacher=None))
    return sum(
        graph_seconds(StepGraph.of(schedule), costs)
        for schedule, costs in (
            (teacher_only(pipeline), plan.costs),
            (student, replace(plan.costs, teacher=())),
        )
    )
