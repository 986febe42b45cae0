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
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.crews.crew import worker_context
from benchmarks.emulated.outcome import Outcome, Report
from benchmarks.emulated.plans import METHODS, prepare
from benchmarks.emulated.real import BATCH_SIZES, simulated_over_real
from benchmarks.emulated.real import PROGRAM as PROGRAM_OF_REAL
from benchmarks.emulated.rows import ROWS
from benchmarks.emulated.runs import PROGRAM, Run, run_all

SECONDS_PER_DEVICE = 0.5
"""What a step takes if no device ever waits, for each device: the overhead of all of them shares
two cores, so each gets as much of these per second, however many there are. On 8 devices that is
4 s; the paper's steps there took longer (35 samples/s with ViT-H)."""
FRACTION = 1 / 64
"""Of the real bytes that travel between stages: two cores copy for all devices."""
NUM_AT_ONCE = 6
"""Baselines that run beside each other: of each, few devices work at a time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    # Asked to end, end through the context managers: no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # workers inherit it before they load torch
    start = time.monotonic()
    report = Report(SECONDS_PER_DEVICE, FRACTION)
    try:
        if options.real:
            real = worker_context(PROGRAM_OF_REAL)
            for name in options.real:
                report.real[name] = simulated_over_real(name, real)
        with TemporaryDirectory(prefix="emulated-") as folder:
            _emulate(options, report, Path(folder))
    finally:  # what is there is kept, whoever ends the run
        report.seconds = time.monotonic() - start
        print(report.text)
        if options.json is not None:
            report.write(options.json)
    return 0 if report.complete else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one model on 4 devices")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--devices", nargs="+", type=int, help="instead of each model's own")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--real", nargs="*", choices=BATCH_SIZES, default=list(BATCH_SIZES), help="real runs too"
    )
    parser.add_argument("--json", type=Path, help="write the result here, the table beside it")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.devices, options.real = ["mocov3_vit_b"], [4], []
    return options


def _emulate(options: argparse.Namespace, report: Report, folder: Path) -> None:
    """Plan everything; then run every TSPipe alone, and the baselines beside each other."""
    start = time.monotonic()
    context = worker_context(PROGRAM)
    rows = [
        (row, count)
        for row in ROWS
        if row.name in options.models
        for count in options.devices or row.num_devices
    ]
    with context.Pool(os.cpu_count()) as pool:
        arguments = [(row.name, count, count * SECONDS_PER_DEVICE, FRACTION) for row, count in rows]
        prepared = pool.starmap(prepare, arguments, chunksize=1)
    runs = []
    for (row, num_devices), found in zip(rows, prepared, strict=True):
        outcome = Outcome(row, num_devices, found.work, simulated=found.simulated)
        report.add(outcome)
        for method in options.methods:
            file = folder / f"{row.name}.{num_devices}.{method}.json"
            file.write_text(found.plans[method], encoding="utf-8")
            runs.append(Run(outcome, method, file))
    print(f"planned in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    # As many processes side by side as the most devices.
    ours = [run for run in runs if run.method == "tspipe"]
    counts = sorted({count for _, count in rows})
    for count in counts:
        these = [run for run in ours if run.outcome.num_devices == count]
        run_all(these, context, counts[-1] // count)
    others = [run for run in runs if run.method != "tspipe"]
    # The longest first, so that none of them is alone at the end.
    others.sort(key=lambda run: -run.outcome.simulated[run.method])
    run_all(others, context, NUM_AT_ONCE)


if __name__ == "__main__":
    sys.exit(main())
