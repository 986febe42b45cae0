"""What a GPU shows, in ten minutes at most: `make gpu` writes one JSON, one log, and prints a row.

Each part is a process with a time limit of its own, so that one that hangs costs that much and no
more. Without a GPU it says so and exits with 2; ``--device cpu`` runs the parts that need none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.device import SHARED, VARIABLE

ROOT = Path(__file__).resolve().parents[2]
RESULT = "result: "
"""Before the JSON that a measurement prints."""
_PYTEST = (
    sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".", "-q",
    "-p", "no:cacheprovider", "--tb=short",
)  # fmt: skip
_AT_ONCE = ("-n", "4") if find_spec("xdist") else ()
_ON_ONE_GPU = [
    f"tests/integration/test_{name}.py"
    for name in ("found", "relay", "fanout", "freezing", "lost_gradients")
]
_MEASURE = (sys.executable, "-m", "tests.gpu.measures")


@dataclass(frozen=True)
class Part:
    """Something to be seen.

    Attributes:
        name: In a few words.
        command: What runs; it ends with 0 if all is well.
        seconds: The most that it may take.
        num_gpus: That it needs; 0: it runs on the CPU too.
        environment: Further variables.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    num_gpus: int = 1
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """What came of a part.

    Attributes:
        outcome: ``passed``, ``failed``, ``too slow`` or ``left out``.
        seconds: That it took.
        figures: What it measured.
        told: Its last line, or why it was left out.
    """

    outcome: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    told: str = ""


def files_marked(mark: str) -> list[str]:
    """The test files with a mark; others may import what such a machine lacks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if f"mark.{mark}" in file.read_text()]


def parts_on(device: str) -> tuple[Part, ...]:
    """All parts, those first that tell most."""

    def measured(what: str, seconds: float, num_gpus: int = 0) -> Part:
        return Part(what, (*_MEASURE, what.lower().replace(" ", "_"), device), seconds, num_gpus)

    return (
        Part(
            "two ranks on one GPU, two GPUs, precisions",
            (*_PYTEST, "-m", "cuda", *files_marked("cuda")), 120,
        ),
        Part(
            "ranks as threads, in float64",
            (*_PYTEST, "-m", "slow or exhaustive", "tests/gpu/test_threads.py"), 150, 0,
            {VARIABLE: device},
        ),
        Part(
            "processes on one GPU", (*_PYTEST, *_AT_ONCE, "-m", "not slow", *_ON_ONE_GPU),
            150, 1, {SHARED: "gpu"},
        ),
        measured("waits of the host", 60, 1),
        measured("alone against Lightning", 90),
        measured("planned against real memory", 60, 1),
        measured("profile against step", 60),
        measured("options of a training", 90),
        measured("overhead of recording", 60),
        measured("two ranks of NCCL on one GPU", 45, 1),
    )  # fmt: skip


def look(part: Part, device: str, deadline: float, log: Any) -> Seen:
    """Run a part, if it can be."""
    number = torch.cuda.device_count() if device != "cpu" else 0
    if part.num_gpus > number:
        return Seen("left out", told="needs a GPU")
    limit = min(part.seconds, deadline - time.monotonic())
    if limit < 1:
        return Seen("left out", told="no time was left")
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **part.environment}
    with subprocess.Popen(  # noqa: S603 - our own commands
        part.command, cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
            outcome = "passed" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            outcome = "too slow"
    seconds = time.monotonic() - started
    log.write(f"\n##### {part.name}: {outcome} in {seconds:.1f} s\n{output}")
    log.flush()
    lines = [line for line in output.splitlines() if line.strip()]
    found = [line for line in lines if line.startswith(RESULT)]
    figures = json.loads(found[-1][len(RESULT) :]) if found else {}
    return Seen(outcome, round(seconds, 1), figures, lines[-1] if lines and not found else "")


def machine(device: str) -> dict[str, Any]:
    """Hardware and software."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "lightning", "torchmetrics", "lightly")},
        "cpus": os.cpu_count(),
        "gpus": [],
    }
    if device != "cpu":
        number = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(number)]
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def row(found: dict[str, Any], seen: dict[str, Seen]) -> str:
    """The line of docs/guide/gpus.md."""
    names = found["gpus"]
    hardware = f"{len(names)} x {names[0]}" if names else f"CPU, {found['cpus']} cores"
    software = f"Python {found['python']}, torch {found['torch']}, lightning {found['lightning']}"
    if names:
        software += f", CUDA {found['cuda']}, NCCL {found['nccl']}"
    outcomes = [one.outcome for one in seen.values()]
    good = f"{outcomes.count('passed')} of {len(outcomes)} parts passed"
    others = "; ".join(
        f"{one.outcome}: {name}" for name, one in seen.items() if one.outcome != "passed"
    )
    return f"| {hardware} | {software} | {good}{f' ({others})' if others else ''} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; 0 if those that ran passed, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", choices=("cuda:0", "cpu"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--part", action="append", help="only parts whose name contains this")
    options = parser.parse_args(arguments)
    if options.device != "cpu" and torch.cuda.device_count() == 0:
        print("make gpu: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * options.minutes
    options.folder.mkdir(parents=True, exist_ok=True)
    found, seen = machine(options.device), {}
    with (options.folder / "gpu.log").open("w", encoding="utf-8") as log:
        log.write(f"{json.dumps(found)}\n")
        for part in parts_on(options.device):
            if options.part and not any(text in part.name for text in options.part):
                continue
            one = seen[part.name] = look(part, options.device, deadline, log)
            told = ", ".join(f"{k} {v}" for k, v in one.figures.items()) or one.told
            print(f"{one.outcome:9} {one.seconds:6.1f} s  {part.name}: {told}", flush=True)
    written = {"machine": found, "parts": {name: asdict(one) for name, one in seen.items()}}
    (options.folder / "gpu.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
    print(f"\n{options.folder}/gpu.json, gpu.log\nfor docs/guide/gpus.md:\n{row(found, seen)}")
    return int(any(one.outcome in {"failed", "too slow"} for one in seen.values()))


if __name__ == "__main__":
    sys.exit(main())
