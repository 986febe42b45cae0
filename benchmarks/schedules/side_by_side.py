"""Beside ``torch.distributed.pipelining``: the same stages, the same schedules, in turns.

    python benchmarks/schedules/side_by_side.py [--rounds 2] [--json FILE]

On two real cores stages compute; on four emulated devices they sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.environment import environment_of, show

NAMES = ("1f1b", "interleaved", "zbv")
SIZES = {"linear": 2, "sleeping": 4}
PACKAGES = ("torch", "lightning")
_SECONDS = 300


def _run(module: str, *arguments: object, file: Path | None = None) -> subprocess.Popen[bytes]:
    given = [str(argument) for argument in (*arguments, file) if argument is not None]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.schedules.{module}", *given]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)  # noqa: S603


def torch_seconds(name: str, kind: str, file: Path) -> list[float]:
    """Seconds of windows by torch's schedule."""
    size, port = SIZES[kind], _free_port()
    ranks = [_run("torch_side", name, kind, rank, size, port, file=file) for rank in range(size)]
    for rank in ranks:
        rank.wait(_SECONDS)
    return _read(file)


def our_seconds(name: str, kind: str, file: Path) -> list[float]:
    """Seconds of windows by ours."""
    _run("our_side", name, kind, SIZES[kind], file=file).wait(_SECONDS)
    return _read(file)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _read(file: Path) -> list[float]:
    seconds: list[float] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    return seconds[1:]  # the first ones still set up


def main() -> int:
    """Measure in turns, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--names", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with TemporaryDirectory(prefix="schedules-") as folder:
        file = Path(folder) / "seconds.json"
        for kind in options.kinds:
            for name in options.names:
                theirs, ours = [], []
                for _ in range(options.rounds):
                    theirs += torch_seconds(name, kind, file)
                    ours += our_seconds(name, kind, file)
                found = {"torch_seconds": median(theirs), "seconds": median(ours)}
                found["torch_over_tspipe"] = found["torch_seconds"] / found["seconds"]
                figures[f"{kind}.{SIZES[kind]}.{name}"] = found
                print(kind, name, found, file=sys.stderr, flush=True)
    report = {"environment": environment_of(PACKAGES), "figures": figures}
    show(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
