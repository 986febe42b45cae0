"""Runs emulated pipelines: one alone, or several beside each other."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from queue import Empty, SimpleQueue

from benchmarks.crews.crew import Crew, MethodError
from benchmarks.crews.job import Job
from benchmarks.emulated.outcome import Outcome
from benchmarks.emulated.plans import BATCH_SIZE

PROGRAM = "benchmarks.emulated.training"
STEPS = {"tspipe": (3, 2), "gpipe": (2, 1), "gpipe_joined": (2, 1), "sequential": (2, 1)}
"""Steps that warm up, and timed ones. A batch that is read ahead counts among the first; in the
first steps every process builds its schedules."""


_STARTING = threading.Lock()
"""Processes that start keep both cores busy: one crew after the other."""


@dataclass(frozen=True)
class Run:
    """One method on one model.

    Attributes:
        outcome: Where the result goes.
        method: One of :data:`~.plans.METHODS`.
        plan: File with its plan.
    """

    outcome: Outcome
    method: str
    plan: Path


def run_all(runs: Sequence[Run], context: ForkServerContext, num_at_once: int) -> None:
    """Run them all, some beside each other, in their order."""
    waiting: SimpleQueue[Run] = SimpleQueue()
    for run in runs:
        waiting.put(run)

    def work() -> None:
        while True:
            try:
                run = waiting.get_nowait()
            except Empty:
                return
            run_one(run, context)

    # Daemons: whoever ends the program doesn't wait for them.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_one(run: Run, context: ForkServerContext) -> None:
    """Measure seconds per step, or note what went wrong."""
    outcome, method = run.outcome, run.method
    label = f"[{outcome.row.name}, {outcome.num_devices} devices] {method}"
    try:
        seconds = _measure(run, context, label)
    except MethodError as error:
        outcome.failures[method] = str(error)
        print(f"{label} FAILED: {error}", file=sys.stderr, flush=True)
        return
    outcome.emulated[method] = seconds
    print(
        f"{label}: {seconds:.3f} s per step, simulated {outcome.simulated[method]:.3f}",
        file=sys.stderr,
        flush=True,
    )


def _measure(run: Run, context: ForkServerContext, label: str) -> float:
    """Seconds per step."""
    job = Job(
        program=PROGRAM,
        workload="emulated",
        method=run.method,
        options=(("plan", str(run.plan)),),
        batch_size=BATCH_SIZE,
        num_ranks=run.outcome.num_devices,
        rank=0,
        port=0,
    )
    num_warmup, num_steps = STEPS[run.method]
    with Crew(job, context) as crew:
        with _STARTING:
            start = time.monotonic()
            crew.start()
            print(f"{label} starts in {time.monotonic() - start:.1f} s", file=sys.stderr)
        return crew.turn(num_steps, num_warmup) / num_steps
