"""What ``tspipe plan --compare`` says of DDP and FSDP2, beside real runs of both: two real cores.

    python benchmarks/advice/main.py [--rounds 3] [--workload kd] [--json FILE]

In each round costs are measured by two processes at once, as both cores are busy in a run, then
sums and gathering over gloo, and then the methods run: what else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.advice.train import BATCHES, WARM_UP
from benchmarks.environment import environment_of, show
from benchmarks.throughput.workloads import WORKLOADS
from lightning_tspipe.cli.modules import measure_collectives
from lightning_tspipe.planning.cluster import Cluster
from lightning_tspipe.planning.data_parallel import METHODS, plan_data_parallel
from lightning_tspipe.planning.step_profile import StepProfile

PACKAGES = ("torch", "lightning", "torchvision")
RANKS = 2
_SECONDS = 200


class Turn(NamedTuple):
    """A method in one round.

    Attributes:
        planned: Seconds of a step, as planned.
        computing: Seconds of these that a device computes.
        real: Seconds of a step in a run.
    """

    planned: float
    computing: float
    real: float


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start one of our programs."""
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", *arguments],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def finish(*processes: subprocess.Popen[bytes]) -> None:
    """Wait for programs; none of them is left running.

    Raises:
        RuntimeError: One of them failed.
    """
    try:
        codes = [process.wait(timeout=_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"a process ended with {codes}")


def measured(workload: str, folder: Path) -> StepProfile:
    """Costs of a step on one core while the other one does the same; of the slower one."""
    files = [folder / f"costs.{rank}" for rank in range(RANKS)]
    finish(*(start("benchmarks.advice.costs", workload, str(file)) for file in files))
    profiles = [StepProfile.from_json(file.read_text(encoding="utf-8")) for file in files]
    plans = [plan_data_parallel(each, Cluster(RANKS), "ddp") for each in profiles]
    return max(zip(plans, profiles, strict=True), key=lambda pair: pair[0].step_seconds)[1]


def real(method: str, workload: str, file: Path) -> float:
    """Seconds of a step in a run.

    Raises:
        RuntimeError: It had another number of steps.
    """
    finish(start("benchmarks.advice.train", method, workload, str(file)))
    seconds: list[float] = json.loads(file.read_text(encoding="utf-8"))
    if len(seconds) != BATCHES - 1:
        raise RuntimeError(f"{method} trained {len(seconds) + 1} steps instead of {BATCHES}")
    return median(seconds[WARM_UP:])


def main() -> int:
    """Plan, measure in turns, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="kd")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds: dict[str, list[Turn]] = {method: [] for method in METHODS}
    with TemporaryDirectory(prefix="advice-") as name:
        folder = Path(name)
        for _ in range(options.rounds):
            profile, links = measured(options.workload, folder), measure_collectives("cpu")
            assert links is not None
            print(links, file=sys.stderr)
            for method in METHODS:
                plan = plan_data_parallel(profile, Cluster(RANKS), method, collectives=links)
                seconds = real(method, options.workload, folder / method)
                turn = Turn(plan.step_seconds, plan.computing_seconds, seconds)
                rounds[method].append(turn)
                print(method, turn, file=sys.stderr)
    report: dict[str, Any] = {
        "environment": environment_of(PACKAGES),
        "figures": {
            f"planned_over_real_{method}": median(turn.planned / turn.real for turn in turns)
            for method, turns in rounds.items()
        },
        "workload": options.workload,
        "rounds": {method: [turn._asdict() for turn in turns] for method, turns in rounds.items()},
    }
    show(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
