"""Blockwise relaying beside data parallelism and layer-wise scheduling.

    python benchmarks/relay/main.py [--quick] [--json FILE]

README.md says what is measured, what is emulated, and how.
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
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.crews.crew import Crew, worker_context
from benchmarks.crews.job import Job
from benchmarks.environment import environment_of
from lightning_tspipe.planning.relay import (
    BlockProfile,
    RelayPlan,
    RelayProfile,
    plan_mode,
    seconds_per_batch,
)
from lightning_tspipe.planning.table import aligned

PROGRAM = "benchmarks.relay.training"
PACKAGES = ("torch", "torchvision", "lightning")
METHODS = ("dpu", "dp", "ls")
BATCH_SIZES = {"compression": 32, "nas": 16}
EPOCH = 24
"""Batches, as the loaders have it."""
EMULATED_SECONDS = 0.6
"""What an emulated step takes that never waits."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(description="Blockwise relaying beside other ways.")
    parser.add_argument("--quick", action="store_true", help="small batches, one round")
    parser.add_argument("--real", nargs="*", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    parser.add_argument("--json", type=Path, help="write the result here, the table beside it")
    options = parser.parse_args(arguments)
    # Asked to end, end through the context managers: no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # workers inherit it before they load torch
    context = worker_context(PROGRAM)
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    for workload in options.real:
        _real(workload, options.quick, context, figures, rows)
        print(f"[{workload}] after {time.monotonic() - started:.0f} s", file=sys.stderr)
        print(_text(figures, rows), file=sys.stderr, flush=True)
    _emulated(options.quick, context, figures, rows)
    text = _text(figures, rows)
    print(text)
    if options.json is not None:
        content = {"environment": environment_of(PACKAGES), "figures": figures, "rows": rows}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        options.json.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    return 0


def _job(
    workload: str, method: str, batch_size: int, num_ranks: int, **options: str | float
) -> Job:
    return Job(
        program=PROGRAM, workload=workload, method=method, options=tuple(options.items()),
        batch_size=batch_size, num_ranks=num_ranks, rank=0, port=0,
    )  # fmt: skip


def _real(
    workload: str,
    quick: bool,
    context: ForkServerContext,
    figures: dict[str, float],
    rows: list[dict[str, Any]],
) -> None:
    """Two processes, one thread each; interleaved rounds of whole epochs."""
    batch_size, rounds = (4, 1) if quick else (BATCH_SIZES[workload], 3)
    num_steps = 2 if quick else EPOCH
    with TemporaryDirectory(prefix="relay-") as name:
        folder = Path(name)
        measure = partial(_measured, workload, batch_size, 3 if quick else 20, context)
        before = measure(folder / "before")
        plans = {method: plan_mode(method, before, 2) for method in ("dpu", "ls", "dp")}
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        with ExitStack() as stack:
            crews = {}
            for method in METHODS:
                counts = folder / method
                counts.mkdir()
                partition = _numbers(plans[method])
                job = _job(workload, method, batch_size, 2, partition=partition, counts=str(counts))
                crews[method] = stack.enter_context(Crew(job, context))
                crews[method].start()
                if not quick:
                    crews[method].turn(1)  # the first steps measure nothing
            for _ in range(rounds):
                for method, crew in crews.items():
                    seconds[method].append(crew.turn(num_steps) / num_steps)
        counted = {method: _counted(folder / method, batch_size) for method in METHODS}
        # The machine is not always as fast: costs are the means of before and after.
        after = measure(folder / "after")
    ideal = {
        m: mean(seconds_per_batch(m, plans[m], one) for one in (before, after))  # type: ignore[arg-type]
        for m in METHODS
    }
    fractions = []
    for other in ("dp", "ls"):
        ratios = [o / r for o, r in zip(seconds[other], seconds["dpu"], strict=True)]
        figures[f"{workload}.relay_over_{other}"] = median(ratios)
        fractions.append(median(ratios) / (ideal[other] / ideal["dpu"]))
        figures[f"{workload}.fraction_of_ideal_{other}"] = fractions[-1]
        figures[f"{workload}.ideal_over_{other}"] = ideal[other] / ideal["dpu"]
    figures[f"{workload}.fraction_of_ideal"] = min(fractions)
    rows += [
        {
            "workload": workload, "method": method, "batch_size": batch_size,
            "seconds_per_step": median(seconds[method]), "all_seconds": seconds[method],
            "profiled_seconds": ideal[method], "partition": _numbers(plans[method]),
            **counted[method],
        }
        for method in METHODS
    ]  # fmt: skip


def _numbers(plan: RelayPlan) -> str:
    return " ".join(str(b - a) for a, b in zip(plan.cuts, plan.cuts[1:], strict=False))


def _measured(
    workload: str, batch_size: int, steps: int, context: ForkServerContext, folder: Path
) -> RelayProfile:
    """The blocks' costs, measured by the strategy with both cores at work."""
    options: dict[str, str | float] = {"cache": str(folder), "profile_steps": steps}
    with Crew(_job(workload, "ahd", batch_size, 2, **options), context) as crew:
        crew.start()
        crew.turn(1)
    (file,) = folder.glob("relay-*.json")
    blocks = []
    for data in json.loads(file.read_text(encoding="utf-8")):
        for kind in ("teacher", "student"):
            data[kind] = {int(n): s for n, s in data[kind].items()}
        blocks.append(BlockProfile(**data))
    return RelayProfile(tuple(blocks), batch_size, 1.5e-4, 4e9)


def _counted(folder: Path, batch_size: int) -> dict[str, Any]:
    """Per batch: how often each block of the teacher ran, and what was read."""
    ranks = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(folder.glob("rank*.json"))]
    if not ranks:
        return {}
    steps = ranks[0]["steps"]
    blocks = sorted({int(block) for rank in ranks for block in rank["forwards"]})
    runs = [
        sum(rank["forwards"].get(str(block), 0) for rank in ranks) / steps / batch_size
        for block in blocks
    ]
    return {
        "teacher_runs_per_batch": runs,
        "bytes_loaded_per_batch": sum(rank["bytes_loaded"] for rank in ranks) / steps,
    }


def _emulated(
    quick: bool, context: ForkServerContext, figures: dict[str, float], rows: list[dict[str, Any]]
) -> None:
    """Four devices that sleep; with loaders, and with batches that are there."""
    with context.Pool(1) as pool:
        priced = pool.apply(_priced)
    papers = priced["papers"]
    figures["ahd_over_optimum"] = max(found["chosen_over_best"] for found in papers)
    even = _run_emulated(priced["even"], "ahd", context, 3 if quick else EPOCH)
    figures["emulated.even.utilization"] = priced["even"]["work"] / (4 * even)
    for found in papers[:1] if quick else papers:
        name = f"emulated.{found['name']}"
        seconds = {
            loader: {
                method: _run_emulated(run, method, context, 2 if method == "dp" else EPOCH)
                for method in ("ahd", "dp")
            }
            for loader, run in found["runs"].items()
        }
        ratios = {loader: each["dp"] / each["ahd"] for loader, each in seconds.items()}
        figures[f"{name}.relay_over_dp"] = ratios["emulated"]
        figures[f"{name}.relay_over_dp_without_loads"] = ratios["none"]
        alone = found["runs"]["none"]
        figures[f"{name}.utilization"] = alone["work"] / (4 * seconds["none"]["ahd"])
        figures[f"{name}.utilization_of_planned"] = (
            figures[f"{name}.utilization"] / alone["planned_utilization"]
        )
        rows.append(
            {
                "workload": found["name"], "paper": found["paper"], "emulated_seconds": seconds,
                "simulated": found["simulated"], "rates": priced["rates"],
                "planned_utilization": alone["planned_utilization"],
                "partition": alone["partition"], "widths": alone["widths"],
            }
        )  # fmt: skip


def _run_emulated(
    found: dict[str, Any], method: str, context: ForkServerContext, num_steps: int
) -> float:
    with TemporaryDirectory(prefix="relay-") as name:
        file = Path(name) / "profile.json"
        file.write_text(found["profile"], encoding="utf-8")
        options: dict[str, str | float] = {"profile": str(file), "load": found["load"]}
        if method == "ahd":
            options |= {"partition": found["partition"], "widths": found["widths"]}
        job = _job("sleeping", method, found["batch_size"], 4, **options)
        with Crew(job, context) as crew:
            crew.start()
            return crew.turn(num_steps) / num_steps


def _priced() -> dict[str, Any]:
    """The paper's workloads, in a process of its own: the coordinator never loads torch."""
    from benchmarks.relay.pricing import priced  # noqa: PLC0415

    return priced(EMULATED_SECONDS)


def _text(figures: dict[str, float], rows: Sequence[dict[str, Any]]) -> str:
    table = [("workload", "method", "s per step", "profiled", "teacher runs", "KB read")]
    emulated = [("workload", "the paper's", "emulated", "no loads", "utilization", "planned")]
    simulated = [("workload", "slowest loaders", "emulated", "measured here", "no loads")]
    for row in rows:
        name = row["workload"]
        if "method" in row:
            runs = row.get("teacher_runs_per_batch", [0])
            table.append((
                name, row["method"], f"{row['seconds_per_step']:.3f}",
                f"{row['profiled_seconds']:.3f}", f"{min(runs):.1f} to {max(runs):.1f}",
                f"{row.get('bytes_loaded_per_batch', 0) / 1e3:.0f}",
            ))  # fmt: skip
        else:
            found = [figures[f"emulated.{name}.{figure}"] for figure in (
                "relay_over_dp", "relay_over_dp_without_loads", "utilization"
            )]  # fmt: skip
            numbers = [row["paper"], *found, row["planned_utilization"]]
            emulated.append((name, *(f"{number:.2f}" for number in numbers)))
            ratios = [row["simulated"][key] for key in ("slowest", "emulated", "measured", "none")]
            simulated.append((name, *(f"{ratio:.2f}" for ratio in ratios)))
    lines = [f"{name}: {value:.4g}" for name, value in figures.items()]
    facts = [f"{name}: {value}" for name, value in environment_of(PACKAGES).items()]
    return "\n".join([
        "REAL: two processes", "", *aligned(table), "",
        "EMULATED: relaying over data parallelism, four devices that sleep", "",
        *aligned(emulated), "", "SIMULATED: the same, by the loaders' rate", "",
        *aligned(simulated), "", *lines, "", *facts,
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
