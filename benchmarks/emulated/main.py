"""Pipelines of 8 and 16 emulated devices: everything is real but the arithmetic.

    python benchmarks/emulated/main.py [--quick] [--json FILE]

README.md says what is emulated and how.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.crews.crew import Crew, MethodError, worker_context
from benchmarks.crews.job import Job
from benchmarks.emulated.outcome import Outcome, Report
from benchmarks.emulated.real import BATCH_SIZES, simulated_over_real
from benchmarks.emulated.real import PROGRAM as PROGRAM_OF_REAL
from benchmarks.emulated.rows import ROWS, Row
from benchmarks.emulated.world import ACTION_SECONDS, emulated, work_seconds
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile

PROGRAM = "benchmarks.emulated.training"
DEVICES = (8, 16)
BATCH_SIZE = 256
STEP_SECONDS = 2.0
"""What a step takes if no device ever waits."""
FRACTION = 1 / 64
"""Of the real bytes that travel between stages: two cores copy for all devices."""
METHODS = ("tspipe", "gpipe", "sequential")
GPIPE_UNITS = 8
"""Micro-batches of GPipe per step, over all views: as the paper has it, u = 8."""
STEPS = {"tspipe": 5, "gpipe": 3, "sequential": 1}
"""Timed steps, after two that warm up; one at a time nothing varies."""
LINK = (4e-4, 2e9)
"""Seconds of latency and bytes per second between two processes of this machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    # Asked to end, end through the context managers: no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # workers inherit it before they load torch
    start = time.monotonic()
    context = worker_context(PROGRAM)
    report = Report(STEP_SECONDS, FRACTION)
    for row in (row for row in ROWS if row.name in options.models):
        for num_devices in options.devices:
            report.add(_emulate(row, num_devices, context))
    if options.real:
        real = worker_context(PROGRAM_OF_REAL)
        report.real = {name: simulated_over_real(name, real) for name in options.real}
    print(f"measured in {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(report.text)
    if options.json is not None:
        report.write(options.json)
    return 0 if report.complete else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one model on 4 devices")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES))
    parser.add_argument(
        "--real", nargs="*", choices=BATCH_SIZES, default=list(BATCH_SIZES), help="real runs too"
    )
    parser.add_argument("--json", type=Path, help="write the result here, the table beside it")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.devices, options.real = ["mocov3_vit_b"], [4], []
    return options


def _emulate(row: Row, num_devices: int, context: ForkServerContext) -> Outcome:
    """All methods on one model, one after the other."""
    profile = emulated(_profile(row, context), STEP_SECONDS * num_devices, FRACTION)
    outcome = Outcome(row, num_devices, work_seconds(profile))
    with TemporaryDirectory(prefix="emulated-") as name:
        folder = Path(name)
        for method in METHODS:
            plan = _plan(profile, num_devices, method)
            file = folder / f"{method}.json"
            file.write_text(plan.to_json(), encoding="utf-8")
            try:
                seconds = _run(method, num_devices, file, context)
            except MethodError as error:
                outcome.failures[method] = str(error)
                print(f"[{row.name}] {method} FAILED: {error}", file=sys.stderr)
                continue
            outcome.emulated[method] = seconds
            outcome.simulated[method] = plan.step_seconds
            print(
                f"[{row.name}, {num_devices} devices] {method}: {seconds:.3f} s per step, "
                f"simulated {plan.step_seconds:.3f}",
                file=sys.stderr,
                flush=True,
            )
    return outcome


def _profile(row: Row, context: ForkServerContext) -> StepProfile:
    """Price the model in a process of its own: the coordinator never loads torch."""
    with context.Pool(1) as pool:
        text: str = pool.apply(_priced, (row.name,))
    return StepProfile.from_json(text)


def _priced(name: str) -> str:
    from benchmarks.emulated.papers import profile  # noqa: PLC0415

    return profile(name, BATCH_SIZE).to_json()


def _plan(profile: StepProfile, num_devices: int, method: str) -> Plan:
    """The best plan of a method; TSPipe chooses its micro-batches, around one for each device."""
    num_views = profile.num_calls[0]
    counts = {
        "tspipe": (num_devices, 2 * num_devices // num_views),
        "gpipe": (GPIPE_UNITS // num_views,),
        "sequential": (1,),
    }
    plans = (
        profile.plan(
            num_devices,
            schedule=method,
            num_microbatches=count,
            link=LINK,
            action_overhead=ACTION_SECONDS,
        )
        for count in counts[method]
    )
    return min(plans, key=lambda plan: plan.step_seconds)


def _run(method: str, num_devices: int, plan: Path, context: ForkServerContext) -> float:
    """Seconds per step."""
    job = Job(
        program=PROGRAM,
        workload="emulated",
        method=method,
        options=(("plan", str(plan)),),
        batch_size=BATCH_SIZE,
        num_ranks=num_devices,
        rank=0,
        port=0,
    )
    with Crew(job, context) as crew:
        crew.start()
        if STEPS[method] > 1:
            # In the first steps every process builds its schedules, on cores that all share.
            crew.turn(1)
        return crew.turn(STEPS[method]) / STEPS[method]


if __name__ == "__main__":
    sys.exit(main())
