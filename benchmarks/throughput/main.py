"""How fast is TSPipe, next to what else trains these models on two processes?

    python benchmarks/throughput/main.py [--quick] [--json FILE]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.context import ForkServerContext
from pathlib import Path

from benchmarks.throughput.contest import Contest, Length
from benchmarks.throughput.crew import worker_context
from benchmarks.throughput.entries import Entry, comparison, overhead, single_device
from benchmarks.throughput.figures import (
    Result,
    comparison_figures,
    overhead_figures,
    rows_of,
    single_device_figures,
)
from benchmarks.throughput.table import figures_table, table

BATCH_SIZES = {"byol": 32, "moco": 16, "kd": 32}
QUICK_BATCH_SIZES = {"byol": 16, "moco": 8, "kd": 16}
TINY_BATCH_SIZE = 16
SINGLE_DEVICE_WORKLOAD = "byol"


@dataclass
class Report:
    """What comes out of a run, as written to the JSON."""

    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, object]] = field(default_factory=list)
    background: float = 0.0

    def add(self, results: Sequence[Result], figures: dict[str, float]) -> None:
        """Add one contest."""
        self.figures |= figures
        self.rows += rows_of(results)

    @property
    def complete(self) -> bool:
        """Whether no method failed."""
        return not any("failure" in row for row in self.rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    # Asked to end, end through the context managers: no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads torch: workers inherit it
    report = _measure(options, worker_context())
    text = f"{table(report.rows)}\n\n{figures_table(report.figures)}"
    print(text)
    if options.json is not None:
        _write(options.json, report, text)
    return 0 if report.complete else 1
