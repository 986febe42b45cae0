"""What ``tspipe plan --compare`` says of DDP and FSDP2, beside real runs of both: two real cores.

    python benchmarks/advice/main.py [--rounds 3] [--workload kd] [--json FILE]

Costs are measured by two processes at once, as both cores are busy in a run, and so are sums and
gathering over gloo. Then the methods take turns.
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
from typing import Any

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
    """Seconds of a step in a run."""
    finish(start("benchmarks.advice.train", method, workload, str(file)))
    seconds: list[float] = json.loads(file.read_text(encoding="utf-8"))
    assert len(seconds) == BATCHES - 1
    return median(seconds[WARM_UP:])


def main() -> int:
    """Plan, measure in turns, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="kd")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    with TemporaryDirectory(prefix="advice-") as name:
        folder = Path(name)
        profile = measured(options.workload, folder)
        links = measure_collectives("cpu")
        assert links is not None
        print(links, file=sys.stderr)
        for number in range(options.rounds):
            for method in METHODS:
                seconds[method].append(real(method, options.workload, folder / method))
                print(number, method, seconds[method][-1], file=sys.stderr)
    cluster = Cluster(RANKS)
    plans = {
        method: plan_data_parallel(profile, cluster, method, collectives=links)
        for method in METHODS
    }
    figures: dict[str, Any] = {
        f"planned_over_real_{method}": plan.step_seconds / median(seconds[method])
        for method, plan in plans.items()
    }
    report = {
        "environment": environment_of(PACKAGES),
        "figures": figures,
        "workload": options.workload,
        "planned_seconds": {method: plan.step_seconds for method, plan in plans.items()},
        "computing_seconds": {method: plan.computing_seconds for method, plan in plans.items()},
        "real_seconds": seconds,
        "gradients": str(links.all_reduce),
        "overlap": links.overlap,
    }
    show(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
