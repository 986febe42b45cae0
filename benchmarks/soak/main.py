"""Does anything grow while a training runs?

    python benchmarks/soak/main.py [--steps 5000] [--modes tspipe,relay] [--json FILE]

Every mode trains a tiny model for thousands of batches. Each rank notes every 100 batches what its
process holds: memory of its own, shared memory, open files, mappings, threads. A line through what
comes behind the first 500 batches tells the growth. The exit status is 1 if something grows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
from lightning.pytorch import Callback
from typing_extensions import override

from benchmarks.environment import environment_of
from benchmarks.soak.modes import MODES, train

ROOT = Path(__file__).resolve().parents[2]
EVERY = 100
WARMUP = 500
LIMITS = {"own": 4.0, "shared": 1.0, "files": 4.0, "maps": 20.0, "threads": 0.5}
"""By how much each may grow over the whole run behind the warm-up: megabytes, or numbers.

A buffer of messages is a file, and one more is made when a rank is further behind than it ever was;
how far that may be is limited. What grows with every epoch or checkpoint is ten times that.
"""
INTERNED = 1_000_000
"""Strings that are interned and dropped before the first batch: a few rebuilds of the table."""
PACKAGES = ("torch", "lightning")


def held() -> dict[str, float]:
    """What this process holds: MB of its own and shared, and numbers of things.

    ``own`` counts pages that no other process has, ``shared`` shared memory that is in use here.
    """
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    private = re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+)", rollup, re.MULTILINE)
    (shared,) = re.findall(r"^RssShmem:\s+(\d+)", status, re.MULTILINE)
    (threads,) = re.findall(r"^Threads:\s+(\d+)", status, re.MULTILINE)
    return {
        "own": sum(map(int, private)) / 1024,
        "shared": int(shared) / 1024,
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - without a look at each
        "maps": Path("/proc/self/maps").read_bytes().count(b"\n"),
        "threads": int(threads),
    }


class Watch(Callback):
    """Notes what each rank holds, by the number of the batch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._rows: list[dict[str, float]] = []
        self._start = time.monotonic()

    @override
    def on_train_start(self, *_: Any) -> None:
        # Python's table of interned strings counts those that are gone until it is rebuilt, which
        # takes a few MB at some moment of a long run. Here it is rebuilt before the warm-up ends.
        for number in range(INTERNED):
            sys.intern(f"soaked {number}")

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._count += 1
        if self._count % EVERY == 0:
            seconds = time.monotonic() - self._start
            self._rows.append({"batch": self._count, "seconds": seconds, **held()})

    @override
    def on_train_end(self, trainer: Any, *_: Any) -> None:
        rank = trainer.global_rank
        (self._folder / f"rank{rank}.json").write_text(json.dumps(self._rows), encoding="utf-8")


def growth(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """By how much each thing grows from the end of the warm-up to the end of the run.

    Args:
        rows: Of one rank.
    """
    kept = [row for row in rows if row["batch"] >= WARMUP]
    batches = [row["batch"] for row in kept]
    span = batches[-1] - batches[0]
    return {
        what: linear_regression(batches, [row[what] for row in kept]).slope * span
        for what in LIMITS
    }


def soak(mode: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Train a mode in processes of its own; a row for each rank.

    Raises:
        RuntimeError: It failed.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--one", mode, "--steps", str(steps)]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        # torch notes its last 2,000 collectives in a ring, which takes 3 MB until it is full.
        "TORCH_FR_BUFFER_SIZE": "0",
    }  # fmt: skip
    with (folder / "output").open("wb") as output:
        done = subprocess.run(  # noqa: S603 - this script
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
            check=False,
        )  # fmt: skip
    if done.returncode != 0:
        text = (folder / "output").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{mode} failed with {done.returncode}:\n{text[-3000:]}")
    found = []
    for file in sorted(folder.glob("rank*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        milliseconds = rows[-1]["seconds"] / rows[-1]["batch"] * 1000
        found.append(
            {
                "mode": mode, "rank": int(file.stem.removeprefix("rank")), "batches": steps,
                "ms_per_batch": milliseconds, "growth": growth(rows), "last": rows[-1],
                "samples": rows,
            }
        )  # fmt: skip
    return found


def line(row: dict[str, Any]) -> str:
    """A row of the table; a star is where the limit is exceeded."""
    cells = []
    for what, limit in LIMITS.items():
        grown, last = row["growth"][what], row["last"][what]
        star = "*" if grown > limit else " "
        cells.append(f"{last:7.1f} {grown:+6.2f}{star}")
    return f"{row['mode']:<14} {row['rank']:>4} {row['ms_per_batch']:>6.1f}  {' '.join(cells)}"


def does_grow(row: dict[str, Any]) -> bool:
    """Whether a limit is exceeded."""
    return any(row["growth"][what] > limit for what, limit in LIMITS.items())


def _write(rows: list[dict[str, Any]], file: Path) -> None:
    figures = {"ranks": len(rows), "ranks_that_grow": sum(map(does_grow, rows))}
    result = {"environment": environment_of(PACKAGES), "figures": figures, "rows": rows}
    file.write_text(json.dumps(result, indent=1), encoding="utf-8")


def main() -> int:
    """Train all modes, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5000, help="batches of each mode")
    parser.add_argument("--modes", help="some of them, with commas")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        train(options.one, options.steps, Watch(Path.cwd()))
        return 0
    modes = options.modes.split(",") if options.modes else list(MODES)
    names = " ".join(f"{what:>14}" for what in LIMITS)
    print(f"{'mode':<14} rank     ms {names}   (last, and growth behind batch {WARMUP})")
    rows = []
    for mode in modes:
        with tempfile.TemporaryDirectory() as folder:
            found = soak(mode, options.steps, Path(folder))
        for row in found:
            print(line(row), flush=True)
        rows += found
        if options.json is not None:
            _write(rows, options.json)
    grows = [row for row in rows if does_grow(row)]
    print(f"{len(grows)} of {len(rows)} ranks grow")
    return int(bool(grows))


if __name__ == "__main__":
    sys.exit(main())
