"""How long does a training take until its first step has ended: DDP, and a pipeline?

    python benchmarks/startup/main.py [--rounds 3] [--json FILE]

BYOL, two processes on the CPU. Methods take turns. A pipeline starts twice: where nothing is known
of its networks yet (`tspipe`), and where their costs are (`tspipe again`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.environment import environment_of, show
from benchmarks.startup.modules import ENTRIES
from benchmarks.startup.train import LAUNCHED, RANKS
from lightning_tspipe.profiling.costs import CACHE

METHODS = ("ddp", "tspipe", "tspipe again")
PACKAGES = ("torch", "lightning", "torchvision")
_SECONDS = 300
_SLOWER, _MORE = 1.3, 3.0
"""A pipeline may take so many times as long as DDP, and so many seconds more."""


def start(method: str, network: str, folder: Path, bytecode: str) -> dict[str, float]:
    """Seconds of each part of a start, on the rank that reads the data, and of the whole.

    Args:
        method: One of `METHODS`.
        network: What is trained.
        folder: Where costs are kept.
        bytecode: Where compiled sources are kept.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.startup.train",
        method.partition(" ")[0],
        network,
    ]
    own = {
        "OMP_NUM_THREADS": "1", CACHE: str(folder), LAUNCHED: repr(time.time()),
        "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    subprocess.run(  # noqa: S603 - our own program
        [*command, str(folder)], check=True, timeout=_SECONDS, env=os.environ | own,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    parts: dict[str, float] = found[-1]
    return parts | {"whole": max(each["whole"] for each in found)}


def table(seconds: dict[str, dict[str, dict[str, float]]]) -> str:
    """Where the time goes, a row for each start."""
    rows: list[str] = []
    for network, methods in seconds.items():
        for method, parts in methods.items():
            if not rows:
                rows.append(" ".join(f"{name:>9}" for name in ("network" + 16 * " ", *parts)))
            amounts = " ".join(f"{amount:9.2f}" for amount in parts.values())
            rows.append(f"{network:9} {method:13} {amounts}")
    return "\n".join(rows)


def main() -> int:
    """Measure in turns, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        network: {method: [] for method in METHODS} for network in options.networks
    }
    with TemporaryDirectory(prefix="startup-") as bytecode:
        with TemporaryDirectory(prefix="startup-") as folder:
            start("tspipe", options.networks[0], Path(folder), bytecode)
        for _, (network, methods) in product(range(options.rounds), found.items()):
            with TemporaryDirectory(prefix="startup-") as folder:
                for method, starts in methods.items():
                    starts.append(start(method, network, Path(folder), bytecode))
                    print(network, method, starts[-1], file=sys.stderr)
    seconds = {
        network: {
            method: {part: median(each[part] for each in starts) for part in starts[0]}
            for method, starts in methods.items()
        }
        for network, methods in found.items()
    }
    figures: dict[str, Any] = {}
    for network, parts in seconds.items():
        allowed = _SLOWER * parts["ddp"]["whole"] + _MORE
        for method in METHODS[1:]:
            name = f"{network}_{method}_over_allowed".replace(" ", "_")
            figures[name] = parts[method]["whole"] / allowed
    print(table(seconds), file=sys.stderr)
    report = {"environment": environment_of(PACKAGES), "figures": figures, "seconds": seconds}
    show(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
