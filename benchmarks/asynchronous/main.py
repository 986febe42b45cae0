"""Command line of ``benchmarks/async/main.py``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.asynchronous import memory
from benchmarks.asynchronous.entries import EMULATED, POLICIES, REAL
from benchmarks.asynchronous.figures import figures_of_emulated, figures_of_real
from benchmarks.crews.crew import worker_context
from benchmarks.throughput.contest import Contest, Length
from benchmarks.throughput.report import Report

PROGRAM = "benchmarks.asynchronous.methods"
FULL, QUICK = Length(num_rounds=5, num_steps=8), Length(num_rounds=1, num_steps=2)
BATCH_SIZE, QUICK_BATCH_SIZE = 64, 16
EMULATED_STEPS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # workers inherit it before they load torch
    if options.accuracy:
        from benchmarks.asynchronous.accuracy import measure  # noqa: PLC0415 - it loads torch

        return measure(options)
    if options.prediction:
        from benchmarks.asynchronous import prediction  # noqa: PLC0415 - it loads torch

        return prediction.measure(options)
    if options.causes:
        from benchmarks.asynchronous import causes  # noqa: PLC0415 - it loads torch

        return causes.measure(options)
    if options.memory:
        return memory.measure(options)
    start = time.monotonic()
    report = _measure(options)
    print(f"measured in {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(report.text)
    if options.json is not None:
        report.write(options.json)
    return 0 if report.complete else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Asynchronous 1F1B: speed, memory, accuracy.")
    parser.add_argument("--quick", action="store_true", help="small and short: under 3 minutes")
    parser.add_argument("--json", type=Path, help="write the result here, the table beside it")
    parser.add_argument("--accuracy", action="store_true", help="train, instead of timing")
    parser.add_argument("--prediction", action="store_true", help="how good predictions are")
    parser.add_argument("--causes", action="store_true", help="why accuracy is lost")
    parser.add_argument("--memory", action="store_true", help="look at memory, instead of timing")
    parser.add_argument("--images", type=Path, help="with train/ and test/, a folder per class")
    parser.add_argument("--sentences", type=Path, help="with train.tsv and dev.tsv")
    parser.add_argument("--tasks", nargs="+", choices=("resnet", "vgg", "lstm"))
    parser.add_argument("--arms", nargs="+", choices=("gpipe1", "gpipe4", *POLICIES))
    parser.add_argument("--rates", nargs="+", help="learning rates, as 0.05, or 0.05w with warm-up")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--batch-size", type=int, choices=(8, 64), default=8, help="per update")
    parser.add_argument("--samples", type=int, help="train on so many only")
    parser.add_argument("--epochs", type=int, help="train for so many only")
    parser.add_argument("--image", type=Path, help="draw the curves of the accuracies here")
    parser.add_argument("--present", action="store_true", help="train nothing, use what is there")
    parser.add_argument("--runs", type=Path, default=Path("runs/async"), help="single results")
    return parser.parse_args(arguments)


def _measure(options: argparse.Namespace) -> Report:
    length = QUICK if options.quick else FULL
    context = worker_context(PROGRAM)
    report = Report()
    size = QUICK_BATCH_SIZE if options.quick else BATCH_SIZE
    contest = Contest("resnet", size, length, context, program=PROGRAM)
    results = contest.run(REAL)
    report.add(results, figures_of_real(results), contest.background)
    longer = replace(length, num_rounds=min(3, length.num_rounds), num_steps=EMULATED_STEPS)
    contest = Contest("emulated", 4, longer, context, program=PROGRAM)
    results = contest.run(EMULATED)
    report.add(results, figures_of_emulated(results), contest.background)
    return report
