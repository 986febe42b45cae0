"""How much do heads gain that share a trunk, next to runs of their own?

    python benchmarks/fanout/main.py [--quick] [--json FILE]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from statistics import median

from benchmarks.crews.crew import Crew, worker_context
from benchmarks.crews.job import Job
from benchmarks.environment import environment_of
from benchmarks.fanout.figures import (
    METHODS,
    WORKLOADS,
    Measured,
    Row,
    curves_of,
    figures_of,
    row_of,
    text_of,
)
from lightning_tspipe.plots import plot_curves

PROGRAM = "benchmarks.fanout.methods"
PACKAGES = ("torch", "torchvision", "lightning")
NUM_EMULATED_STEPS = 4
_LABEL_BYTES = 24
"""Of one sample: three numbers."""


@dataclass(frozen=True)
class Length:
    """How long to measure.

    Attributes:
        num_rounds: Turns of each method; of the study of queues and on devices that sleep, 3.
        batch_sizes: Of the real runs, and timed steps of a turn.
        depths: Of the study of queues.
    """

    num_rounds: int
    batch_sizes: Mapping[int, int]
    depths: tuple[int, ...]


FULL = Length(4, {32: 16, 128: 8, 256: 6, 1024: 2}, (0, 1, 2, 4))
QUICK = Length(2, {32: 4}, (0, 2))
QUEUED_SIZE = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    # Asked to end, end through the context managers: no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # workers inherit it before they load torch
    started = time.monotonic()
    length = QUICK if options.quick else FULL
    context = worker_context(PROGRAM)
    real = {
        (workload, size): _contest(workload, size, length, context)
        for workload in WORKLOADS
        for size in length.batch_sizes
    }
    rows: list[Row] = [row_of(*key, measured) for key, measured in real.items()]
    figures = figures_of(real)
    queued, emulated = _queues(length, context), _emulated(length, context)
    environment = environment_of(PACKAGES)
    print(f"measured in {time.monotonic() - started:.0f} s", file=sys.stderr)
    content = {
        "environment": environment,
        "figures": figures | emulated,
        "rows": rows + queued,
    }
    text = text_of(content)
    print(text)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=2) + "\n")
        options.json.with_suffix(".txt").write_text(text + "\n")
        plot_curves(curves_of(rows), options.json.with_suffix(".svg"), axis="batch size")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small and short: under 3 minutes")
    parser.add_argument("--json", type=Path, help="write it here, table and drawing beside it")
    return parser.parse_args(arguments)


def _contest(
    workload: str, batch_size: int, length: Length, context: ForkServerContext
) -> Measured:
    """All methods in turns on two processes."""
    measured = Measured(labels=_LABEL_BYTES * batch_size)
    num_steps = length.batch_sizes[batch_size]
    with ExitStack() as stack:
        crews = {
            method: stack.enter_context(Crew(_job(workload, method, batch_size), context))
            for method in METHODS
        }
        for crew in crews.values():
            crew.start()
            crew.turn(2)  # untimed: the first batches also place the networks
        for _ in range(length.num_rounds):
            for method, crew in crews.items():
                seconds = crew.turn(num_steps) / num_steps
                measured.seconds.setdefault(method, []).append(seconds)
        for method in ("fanout", "independent"):
            told = crews[method].weigh()
            measured.peak_bytes[method] = sum(each.notes["peak"] for each in told)
            measured.resident_bytes[method] = sum(each.notes["resident"] for each in told)
            if method == "fanout":
                measured.label_bytes = sum(each.notes["labels"] for each in told)
                names = ("cut", "atoms_in_pieces", "pieces")
                measured.placed = {name: told[0].notes[name] for name in names}
    print(row_of(workload, batch_size, measured), file=sys.stderr, flush=True)
    return measured


def _queues(length: Length, context: ForkServerContext) -> list[Row]:
    """The same training with queues of other depths."""
    rows: list[Row] = []
    with ExitStack() as stack:
        crews = {
            depth: stack.enter_context(
                Crew(
                    _job("stage", "fanout", QUEUED_SIZE, (("queue_depth", depth),)),
                    context,
                )
            )
            for depth in length.depths
        }
        for crew in crews.values():
            crew.start()
            crew.turn(2)  # untimed: the first batches also place the networks
        seconds: dict[int, list[float]] = {depth: [] for depth in crews}
        for _ in range(min(3, length.num_rounds)):
            for depth, crew in crews.items():
                seconds[depth].append(crew.turn(8) / 8)
        for depth, crew in crews.items():
            peak = sum(each.notes["peak"] for each in crew.weigh())
            row = {"workload": "stage", "batch_size": QUEUED_SIZE, "queue_depth": depth}
            row |= {"fanout_ms": round(1e3 * median(seconds[depth]), 1)}
            rows.append(row | {"fanout_peak_mb": round(peak / 1e6, 1)})
    return rows


def _emulated(length: Length, context: ForkServerContext) -> dict[str, float]:
    """The paper's units on three devices that sleep."""
    ratios = []
    with ExitStack() as stack:
        crews = [
            stack.enter_context(Crew(_job("units", method, 1, num_ranks=3), context))
            for method in ("fanout", "independent")
        ]
        for crew in crews:
            crew.start()
            crew.turn(2)
        for _ in range(min(3, length.num_rounds)):
            own, other = (crew.turn(NUM_EMULATED_STEPS) for crew in crews)
            ratios.append(own / other)
    return {
        "emulated.3.time_over_independent": round(median(ratios), 4),
        "emulated.3.fraction_of_ideal": round(0.6 / median(ratios), 4),
    }


def _job(
    workload: str,
    method: str,
    batch_size: int,
    options: tuple[tuple[str, int | float | str], ...] = (),
    num_ranks: int = 2,
) -> Job:
    return Job(PROGRAM, workload, method, options, batch_size, num_ranks, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
