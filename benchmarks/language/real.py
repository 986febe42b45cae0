"""A teacher that fills the pipeline's gaps, beside two phases, DDP and FSDP2: two real cores.

    python benchmarks/language/real.py [--rounds 3] [--json FILE]

Methods take turns; each turn is a training of eight accumulation windows of four batches.
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

from benchmarks.environment import environment_of, show

METHODS = ("tspipe", "two_phase", "ddp", "fsdp2")
PACKAGES = ("torch", "transformers", "lightning")
RANKS = 2
_SECONDS = 300


def turn(method: str, file: Path) -> tuple[list[float], int]:
    """Seconds of windows, and bytes that the fullest rank holds."""
    command = [sys.executable, "-m", "benchmarks.language.train", method, str(file)]
    subprocess.run(  # noqa: S603 - our own program
        command, check=True, timeout=_SECONDS, stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    seconds: list[float] = json.loads(file.read_text(encoding="utf-8"))
    held = [
        json.loads(file.with_suffix(f".{rank}").read_text(encoding="utf-8"))
        for rank in range(RANKS)
    ]
    return seconds[2:], max(sum(each.values()) for each in held)  # the first ones set up


def main() -> int:
    """Measure in turns, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {method: [] for method in options.methods}
    held: dict[str, int] = {}
    with TemporaryDirectory(prefix="language-") as folder:
        for number in range(options.rounds):
            for method in options.methods:
                taken, held[method] = turn(method, Path(folder) / f"{method}.json")
                seconds[method].append(median(taken))
                print(number, method, seconds[method][-1], held[method], file=sys.stderr)
    figures: dict[str, Any] = {
        f"tspipe_over_{method}": median(
            theirs / ours for theirs, ours in zip(taken, seconds["tspipe"], strict=True)
        )
        for method, taken in seconds.items()
        if method != "tspipe"
    }
    if "ddp" in held:
        figures["memory_over_ddp"] = held["tspipe"] / held["ddp"]
    report = {
        "environment": environment_of(PACKAGES), "figures": figures,
        "seconds_per_window": seconds, "largest_bytes": held,
    }  # fmt: skip
    show(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
