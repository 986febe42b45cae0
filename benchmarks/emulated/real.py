"""Real pipelines of two processes beside their plans: how true is the simulation?"""

from __future__ import annotations

import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.crews.crew import Crew
from benchmarks.crews.job import Job
from lightning_tspipe.planning.step_profile import StepProfile

PROGRAM = "benchmarks.throughput.methods"
BATCH_SIZES = {"byol": 64, "moco": 32, "kd": 64}
NUM_STEPS = 8
LINK = (1.5e-4, 4e9)
ACTION_SECONDS = 1e-4


def simulated_over_real(workload: str, context: ForkServerContext) -> float:
    """Planned over measured seconds per step, of one of the throughput benchmark's workloads.

    Args:
        workload: Its name.
        context: Starts processes that have imported :data:`PROGRAM`.

    Raises:
        MethodError: A process failed.
    """
    batch_size = BATCH_SIZES[workload]
    with context.Pool(1) as pool:
        profile = StepProfile.from_json(pool.apply(_measured, (workload, batch_size)))
    plan = profile.plan(2, link=LINK, action_overhead=ACTION_SECONDS)
    with TemporaryDirectory(prefix="emulated-") as name:
        file = Path(name) / "plan.json"
        file.write_text(plan.to_json(), encoding="utf-8")
        job = Job(
            program=PROGRAM,
            workload=workload,
            method="tspipe",
            options=(("plan", str(file)),),
            batch_size=batch_size,
            num_ranks=2,
            rank=0,
            port=0,
        )
        with Crew(job, context) as crew:
            crew.start()
            crew.turn(1)
            seconds = crew.turn(NUM_STEPS) / NUM_STEPS
    print(
        f"[{workload}, real] {seconds:.3f} s per step, simulated {plan.step_seconds:.3f}",
        file=sys.stderr,
        flush=True,
    )
    return plan.step_seconds / seconds


def _measured(workload: str, batch_size: int) -> str:
    """The profile of a step, measured in a process of its own."""
    import torch  # noqa: PLC0415

    from benchmarks.throughput.workloads import WORKLOADS  # noqa: PLC0415
    from lightning_tspipe.cli.modules import measure  # noqa: PLC0415

    torch.set_num_threads(1)
    problem = WORKLOADS[workload]
    return measure(
        problem.module(), problem.batches(batch_size, seed=0), accelerator="cpu"
    ).to_json()
