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
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.environment import environment_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "torchvision", "lightning")
EMULATED = ("baseline", "freeze", "unpipelined", "repack", "cache")
REAL = ("baseline", "freeze", "repack", "cache")
NUM_EPOCHS = 10
"""Of an emulated fine-tuning: the last of the measured ones stands for all that follow."""
TIMEOUT = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit status."""
    options = _parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.monotonic()
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="freeze-") as name:
        folder = Path(name)
        if options.emulated:
            figures |= _emulate(options, folder, rows)
        if options.images is not None:
            figures |= _fine_tune(options, folder, rows)
    print(f"measured in {time.monotonic() - start:.0f} s", file=sys.stderr)
    text = "\n".join(f"{name:<45} {value:8.3f}" for name, value in figures.items())
    print(text)
    if options.json is not None:
        content = {"environment": environment_of(PACKAGES), "figures": figures, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.json.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four devices, one seed, few images")
    parser.add_argument("--images", type=Path, help="with train/ and test/, a folder per class")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--no-emulated", dest="emulated", action="store_false")
    parser.add_argument("--json", type=Path, help="write the result here, the table beside it")
    options = parser.parse_args(arguments)
    options.devices, options.steps, options.seconds = 8, 4, 0.6
    options.sizes, options.epochs, options.before = (8000, 2000, 1000), 6, 6
    if options.quick:
        options.devices, options.steps, options.seconds = 4, 3, 0.2
        options.sizes, options.epochs, options.before = (500, 300, 250), 3, 1
        options.seeds = options.seeds[:1]
    return options


def _emulate(
    options: argparse.Namespace, folder: Path, rows: list[dict[str, Any]]
) -> dict[str, float]:
    plan = folder / "plan.json"
    _run_script("plan_emulated", str(options.devices), str(options.seconds), str(plan))
    found: dict[str, dict[str, Any]] = {}
    for method in EMULATED:
        result = folder / f"emulated-{method}.json"
        _run_script(
            "emulate", method, "--devices", str(options.devices), "--steps", str(options.steps),
            "--seconds", str(options.seconds), "--plan", str(plan), "--result", str(result),
        )  # fmt: skip
        found[method] = json.loads(result.read_text(encoding="utf-8"))
        rows.append({"part": "emulated", "method": method, **found[method]})
        print(f"[emulated] {method}: {found[method]['seconds']}", file=sys.stderr, flush=True)
    totals = {method: _total(one["seconds"]) for method, one in found.items()}
    key = f"emulated.{options.devices}"
    changes = [
        entry["seconds"]
        for method in ("repack", "cache")
        for entry in found[method]["history"]
        if entry["num_replicas"] > 1
    ]
    frozen = {method: sum(found[method]["seconds"][1:]) for method in ("freeze", "unpipelined")}
    return {
        f"{key}.freeze_over_baseline": totals["baseline"] / totals["freeze"],
        f"{key}.repack_over_baseline": totals["baseline"] / totals["repack"],
        f"{key}.total_over_baseline": totals["baseline"] / totals["cache"],
        "transition_seconds": max(changes),
        "transition_seconds_median": median(changes),
        "prefix_in_bubbles_over_unpipelined": frozen["unpipelined"] / frozen["freeze"],
    }


def _total(seconds: Sequence[float]) -> float:
    """Of a step of each epoch; epochs of thousands of steps, beside which a transition is short."""
    return sum(seconds) + (NUM_EPOCHS - len(seconds)) * seconds[-1]


def _fine_tune(
    options: argparse.Namespace, folder: Path, rows: list[dict[str, Any]]
) -> dict[str, float]:
    data = folder / "data.pt"
    sizes = [str(size) for size in options.sizes]
    _run_script("pretrain", str(options.images), *sizes, str(options.before), str(data))
    ratios: dict[str, list[float]] = {method: [] for method in REAL[1:]}
    losses: list[float] = []
    for seed in options.seeds:
        found = {method: _one_run(options, folder, data, method, seed) for method in REAL}
        rows += [{"part": "real", "method": m, "seed": seed, **one} for m, one in found.items()]
        for method, values in ratios.items():
            values.append(found["baseline"]["seconds"] / found[method]["seconds"])
        accuracies = [found[method]["accuracy"] for method in REAL[1:]]
        losses.append(100 * (mean(accuracies) - found["baseline"]["accuracy"]))
        print(f"[real] seed {seed}: {found}", file=sys.stderr, flush=True)
    figures = {f"real.{method}_over_baseline": median(v) for method, v in ratios.items()}
    return {**figures, "real.accuracy_difference": mean(losses)}


def _one_run(
    options: argparse.Namespace, folder: Path, data: Path, method: str, seed: int
) -> dict[str, Any]:
    result = folder / f"real-{method}-{seed}.json"
    _run_script(
        "finetune", method, "--seed", str(seed), "--epochs", str(options.epochs),
        "--data", str(data), "--result", str(result),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _run_script(name: str, *arguments: str) -> None:
    """Run one of this folder's programs, and all processes that it starts."""
    command = [sys.executable, "-m", f"benchmarks.freeze.{name}", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT)  # noqa: S603 - ours


if __name__ == "__main__":
    sys.exit(main())
