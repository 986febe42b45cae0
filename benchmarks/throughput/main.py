"""How fast is TSPipe, next to what else trains these models on two processes?

    python benchmarks/throughput/main.py [--quick] [--json FILE]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.crews.crew import worker_context
from benchmarks.throughput.contest import PROGRAM, Contest, Length
from benchmarks.throughput.entries import comparison, overhead, single_device, windows
from benchmarks.throughput.figures import (
    comparison_figures,
    overhead_figures,
    single_device_figures,
)
from benchmarks.throughput.report import Report
from benchmarks.throughput.workloads import WORKLOADS

FULL = Length(num_rounds=5, num_steps=8)
QUICK = Length(num_rounds=2, num_steps=2)
BATCH_SIZES = {"byol": 64, "moco": 32, "kd": 64, "byol_windows": 64}
QUICK_BATCH_SIZES = {"byol": 16, "moco": 8, "kd": 16, "byol_windows": 16}
TINY_BATCH_SIZE = 16
TINY_STEPS_FACTOR = 10
"""Steps of the tiny network take milliseconds: a turn needs more of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    # Asked to end, end through the context managers: no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # workers inherit it before they load torch
    start = time.monotonic()
    report = _measure(options)
    print(f"measured in {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(report.text)
    if options.json is not None:
        report.write(options.json)
    return 0 if report.complete else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small and short: under 3 minutes")
    parser.add_argument("--workloads", nargs="*", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    parser.add_argument("--methods", nargs="+", help="only these, named as in the table")
    parser.add_argument("--rounds", type=int, help="turns of each method")
    parser.add_argument("--steps", type=int, help="timed steps of each turn")
    parser.add_argument("--batch-size", type=int, help="images per step, over all processes")
    parser.add_argument("--comparison-only", action="store_true", help="no overheads")
    parser.add_argument("--json", type=Path, help="write the result here, the table beside it")
    return parser.parse_args(arguments)


def _measure(options: argparse.Namespace) -> Report:
    default = QUICK if options.quick else FULL
    length = Length(options.rounds or default.num_rounds, options.steps or default.num_steps)
    sizes = QUICK_BATCH_SIZES if options.quick else BATCH_SIZES
    context = worker_context(PROGRAM)
    report = Report()
    for workload in options.workloads:
        entries = comparison(num_microbatches=(1, 2) if options.quick else (1, 2, 4))
        if WORKLOADS[workload].window > 1:
            entries = windows()
        if options.methods:
            entries = [entry for entry in entries if entry.name in options.methods]
        contest = Contest(workload, options.batch_size or sizes[workload], length, context)
        results = contest.run(entries)
        report.add(results, comparison_figures(results), contest.background)
    if not options.comparison_only:
        contest = Contest("byol", options.batch_size or sizes["byol"], length, context)
        results = contest.run(single_device())
        report.add(results, single_device_figures(results), contest.background)
        longer = replace(length, num_steps=TINY_STEPS_FACTOR * length.num_steps)
        contest = Contest("tiny", TINY_BATCH_SIZE, longer, context)
        results = contest.run(overhead())
        report.add(results, overhead_figures(results), contest.background)
    return report


if __name__ == "__main__":
    sys.exit(main())
