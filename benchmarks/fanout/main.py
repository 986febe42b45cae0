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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from statistics import median

from benchmarks.crews.crew import Crew, worker_context
from benchmarks.crews.job import Job
from benchmarks.environment import environment_of

PROGRAM = "benchmarks.fanout.methods"
METHODS = ("fanout", "independent", "heads")
NUM_EPOCHS = 10
"""Of the comparison with features that are computed once."""
PACKAGES = ("torch", "torchvision", "lightning")


@dataclass(frozen=True)
class Length:
    """How long to measure.

    Attributes:
        num_rounds: Turns of each method.
        num_steps: Timed steps of a turn.
        batch_sizes: Of the real runs.
        depths: Of the study of queues.
    """

    num_rounds: int
    num_steps: int
    batch_sizes: tuple[int, ...]
    depths: tuple[int, ...]


FULL = Length(3, 3, (32, 128, 512, 1024), (0, 1, 2, 4))
QUICK = Length(2, 2, (32,), (0, 2))


@dataclass
class Measured:
    """What came out of one workload at one batch size.

    Attributes:
        seconds: Per step, by method and round.
        peak_bytes: Of all processes together, by method.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def ratios(self, method: str, other: str) -> list[float]:
        """Round by round."""
        pairs = zip(self.seconds[method], self.seconds[other], strict=True)
        return [own / theirs for own, theirs in pairs]

    @property
    def ideals(self) -> list[float]:
        """What the time over that of independent runs would be if nothing were lost."""
        both = zip(self.seconds["independent"], self.seconds["heads"], strict=True)
        return [((whole - head) / 2 + head) / whole for whole, head in both]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    # Asked to end, end through the context managers: no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # workers inherit it before they load torch
    started = time.monotonic()
    length = QUICK if options.quick else FULL
    context = worker_context(PROGRAM)
    rows: list[dict[str, object]] = []
    real = {
        (workload, size): _contest(workload, size, length, context)
        for workload in ("linear", "stage")
        for size in length.batch_sizes
    }
    for (workload, size), measured in real.items():
        rows.append(_row(workload, size, measured))
    figures = _figures(real)
    rows += _queues(length, context)
    figures |= _emulated(length, context)
    environment = environment_of(PACKAGES)
    print(f"measured in {time.monotonic() - started:.0f} s", file=sys.stderr)
    content = {"environment": environment, "figures": figures, "rows": rows}
    text = _text(content)
    print(text)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=2) + "\n")
        options.json.with_suffix(".txt").write_text(text + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small and short: under 3 minutes")
    parser.add_argument("--json", type=Path, help="write the result here, the table beside it")
    return parser.parse_args(arguments)


def _contest(
    workload: str, batch_size: int, length: Length, context: ForkServerContext
) -> Measured:
    """All methods in turns on two processes."""
    measured = Measured()
    with ExitStack() as stack:
        crews = {
            method: stack.enter_context(Crew(_job(workload, method, batch_size), context))
            for method in METHODS
        }
        for crew in crews.values():
            crew.start()
            crew.turn(length.num_steps)  # untimed: the first batches also place the networks
        for _ in range(length.num_rounds):
            for method, crew in crews.items():
                seconds = crew.turn(length.num_steps) / length.num_steps
                measured.seconds.setdefault(method, []).append(seconds)
        for method, crew in crews.items():
            held = [weighs.held for weighs in crew.weigh()]
            measured.peak_bytes[method] = sum(each.total for each in held if each is not None)
    print(f"{workload} {batch_size}: {measured.seconds}", file=sys.stderr, flush=True)
    return measured


def _queues(length: Length, context: ForkServerContext) -> list[dict[str, object]]:
    """The same training with queues of other depths."""
    size = length.batch_sizes[min(1, len(length.batch_sizes) - 1)]
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        crews = {
            depth: stack.enter_context(
                Crew(_job("stage", "fanout", size, (("queue_depth", depth),)), context)
            )
            for depth in length.depths
        }
        for crew in crews.values():
            crew.start()
            crew.turn(length.num_steps)  # untimed: the first batches also place the networks
        seconds: dict[int, list[float]] = {depth: [] for depth in crews}
        for _ in range(length.num_rounds):
            for depth, crew in crews.items():
                seconds[depth].append(crew.turn(length.num_steps) / length.num_steps)
    for depth, values in seconds.items():
        row = {"workload": "stage", "batch_size": size, "queue_depth": depth}
        rows.append(row | {"seconds_per_step": round(median(values), 4)})
    return rows


def _emulated(length: Length, context: ForkServerContext) -> dict[str, float]:
    """The paper's units on three devices that sleep."""
    ratios = []
    with ExitStack() as stack:
        crews = [
            stack.enter_context(Crew(_job("units", method, 8, num_ranks=3), context))
            for method in ("fanout", "independent")
        ]
        for crew in crews:
            crew.start()
            crew.turn(length.num_steps)
        for _ in range(length.num_rounds):
            own, other = (crew.turn(3 * length.num_steps) for crew in crews)
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


def _figures(real: dict[tuple[str, int], Measured]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for workload in ("linear", "stage"):
        own = [measured for (name, _), measured in real.items() if name == workload]
        times = [median(m.ratios("fanout", "independent")) for m in own]
        ideals = [median(m.ideals) for m in own]
        memory = [m.peak_bytes["fanout"] / m.peak_bytes["independent"] for m in own]
        heads = [median(m.ratios("heads", "fanout")) for m in own]
        wholes = [median(m.ratios("independent", "fanout")) for m in own]
        once = [
            ((w - h) / 2 + NUM_EPOCHS * h) / NUM_EPOCHS for w, h in zip(wholes, heads, strict=True)
        ]
        figures |= {
            f"real.{workload}.time_over_independent": median(times),
            f"real.{workload}.ideal": median(ideals),
            f"real.{workload}.fraction_of_ideal": median(
                ideal / ours for ideal, ours in zip(ideals, times, strict=True)
            ),
            f"real.{workload}.memory_over_independent": median(memory),
            f"real.{workload}.precomputed_{NUM_EPOCHS}_epochs_over_fanout": median(once),
        }
    figures["real.time_over_independent"] = figures["real.linear.time_over_independent"]
    figures["real.memory_over_independent"] = figures["real.linear.memory_over_independent"]
    figures["real.fraction_of_ideal"] = min(
        figures[f"real.{workload}.fraction_of_ideal"] for workload in ("linear", "stage")
    )
    return {name: round(value, 4) for name, value in figures.items()}


def _row(workload: str, size: int, measured: Measured) -> dict[str, object]:
    ratios = measured.ratios("fanout", "independent")
    return {
        "workload": workload,
        "batch_size": size,
        **{
            f"{method}_seconds_per_step": round(median(values), 4)
            for method, values in measured.seconds.items()
        },
        "time_over_independent": round(median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ideal": round(median(measured.ideals), 3),
        **{
            f"{method}_peak_mb": round(size / 1e6, 1)
            for method, size in measured.peak_bytes.items()
        },
    }


def _text(content: dict[str, object]) -> str:
    lines = []
    for name in ("rows", "figures", "environment"):
        part = content[name]
        if isinstance(part, dict):
            lines += [f"{key}: {value}" for key, value in part.items()]
        elif isinstance(part, list):
            lines += [", ".join(f"{key} {value}" for key, value in row.items()) for row in part]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
