"""What freezing, repacking and caching save, and what they cost in accuracy.

    python benchmarks/freeze/main.py [--images DIR] [--quick] [--json FILE]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.environment import environment_of
from benchmarks.freeze.figures import (
    ACCURATE,
    EMULATED,
    REAL,
    accuracy_difference,
    figures_of_emulated,
    figures_of_real,
)

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "torchvision", "lightning")
PARTS = ("real", "emulated", "accuracy")
TIMEOUT = 3600


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.monotonic()
    figures, rows = _of_other_parts(options.json, options.parts)
    with TemporaryDirectory(prefix="freeze-") as name:
        folder = options.work or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for part in options.parts:
            if part == "emulated":
                figures |= _emulate(options, folder, rows)
            elif options.images is not None:
                figures |= _fine_tune(part, options, folder, rows)
            _write(options.json, figures, rows)
    print(f"measured in {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(_table(figures))
    return 0


def _of_other_parts(
    path: Path | None, parts: Sequence[str]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """What a run of other parts has written."""
    if path is None or not path.exists():
        return {}, []
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in found["rows"] if row["part"] not in parts]
    return (found["figures"] if rows else {}), rows


def _write(path: Path | None, figures: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """What was found so far."""
    if path is not None:
        content = {"environment": environment_of(PACKAGES), "figures": figures, "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".txt").write_text(_table(figures) + "\n", encoding="utf-8")


def _table(figures: dict[str, float]) -> str:
    return "\n".join(f"{name:<45} {value:8.3f}" for name, value in figures.items())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four devices, one seed, few images")
    parser.add_argument("--images", type=Path, help="with train/ and test/, a folder per class")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of accuracies")
    parser.add_argument("--rounds", type=int, default=1, help="of the real runs that are timed")
    parser.add_argument("--work", type=Path, help="keep what is slow here, and use it again")
    parser.add_argument(
        "--json", type=Path, help="write the result here, the table beside it; other parts stay"
    )
    options = parser.parse_args(arguments)
    options.devices, options.steps, options.seconds = 8, 6, 0.6
    options.sizes, options.epochs, options.before = (6000, 1000, 4000), 10, 5
    if options.quick:
        options.devices, options.steps, options.seconds = 4, 5, 0.2
        options.sizes, options.epochs, options.before = (500, 300, 250), 3, 1
        options.seeds = options.seeds[:1]
    return options


def _emulate(
    options: argparse.Namespace, folder: Path, rows: list[dict[str, Any]]
) -> dict[str, float]:
    profile, plan = folder / "profile.json", folder / "plan.json"
    _run_script(
        "plan_emulated", str(options.devices), str(options.seconds), str(profile), str(plan)
    )
    found: dict[str, dict[str, Any]] = {}
    for method in EMULATED:
        result = folder / f"emulated-{method}.json"
        _run_script(
            "emulate", method, "--devices", str(options.devices), "--steps", str(options.steps),
            "--profile", str(profile), "--plan", str(plan), "--result", str(result),
        )  # fmt: skip
        found[method] = json.loads(result.read_text(encoding="utf-8"))
        rows.append({"part": "emulated", "method": method, **found[method]})
        print(f"[emulated] {method}: {found[method]}", file=sys.stderr, flush=True)
    return figures_of_emulated(found, options.devices)


def _fine_tune(
    part: str, options: argparse.Namespace, folder: Path, rows: list[dict[str, Any]]
) -> dict[str, float]:
    data = folder / "data.pt"
    if not data.exists():
        sizes = [str(size) for size in options.sizes]
        _run_script("pretrain", str(options.images), *sizes, str(options.before), str(data))
    is_timed = part == "real"
    found = {
        (method, number): _one_run(options, folder, part, method, number)
        for number in (range(options.rounds) if is_timed else options.seeds)
        for method in (REAL if is_timed else ACCURATE)
    }
    rows += [{"part": part, "method": m, "seed": n, **run} for (m, n), run in found.items()]
    if is_timed:
        return figures_of_real(found)
    return {"real.accuracy_difference": accuracy_difference(found)}


def _one_run(
    options: argparse.Namespace, folder: Path, part: str, method: str, seed: int
) -> dict[str, Any]:
    """A fine-tuning; an accuracy that is there already is not found again, also of a timed run."""
    result = folder / f"{part}-{method}-{seed}.json"
    timed = folder / f"real-{method}-{seed}.json"
    if part == "accuracy" and timed.exists():
        result = timed
    if part == "real" or not result.exists():
        _run_script(
            "finetune", method, "--seed", str(seed), "--epochs", str(options.epochs),
            "--data", str(folder / "data.pt"), "--result", str(result),
        )  # fmt: skip
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    print(f"[{part}] {method}, seed {seed}: {found}", file=sys.stderr, flush=True)
    return found


def _run_script(name: str, *arguments: str) -> None:
    """Run one of this folder's programs, and all processes that it starts."""
    command = [sys.executable, "-m", f"benchmarks.freeze.{name}", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT)  # noqa: S603 - ours


if __name__ == "__main__":
    sys.exit(main())
