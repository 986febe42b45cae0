"""Is accuracy kept? Vanilla, TSPipe (teacher one update late), and late gradients.

    python benchmarks/accuracy/main.py --images DIR --sentences DIR [--json FILE]

README.md says what is trained and how. Runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.figures import Run, figures, mean_curves, table
from benchmarks.accuracy.final import final_knn
from benchmarks.accuracy.tasks import ARMS, TASKS
from benchmarks.environment import environment_of
from lightning_tspipe.plots import plot_curves

PACKAGES = ("torch", "torchvision", "lightning", "lightly")
DATA = {"byol": "images", "mocov3": "images", "kd": "sentences"}
TRAIN = Path(__file__).with_name("train.py")


def main() -> int:
    """Train what is missing, print and write; returns the exit status."""
    options = _parse()
    failed = False
    for seed, task, arm in product(options.seeds, options.tasks, options.arms):
        if _load(options.runs, task, arm, seed) is None:
            failed |= not _train(options, task, arm, seed)
        if DATA[task] == "images":
            _measure(options, task, arm, seed)
    every = product(options.tasks, options.arms, options.seeds)
    runs = [run for key in every if (run := _load(options.runs, *key)) is not None]
    results = figures(runs) | _largest_differences(options.runs, runs)
    print(table(runs), *(f"{name}: {value:.4g}" for name, value in results.items()), sep="\n")
    if options.json is not None:
        _write(options.json, runs, results)
    return int(failed)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--images", type=Path, help="with train/ and test/, a folder per class")
    parser.add_argument("--sentences", type=Path, help="with train.tsv and dev.tsv")
    parser.add_argument("--runs", type=Path, default=Path("runs/accuracy"), help="single results")
    parser.add_argument("--json", type=Path, help="write the result here, the table beside it")
    options = parser.parse_args()
    for task in options.tasks:
        if getattr(options, DATA[task]) is None:
            parser.error(f"{task} needs --{DATA[task]}")
    return options


def _train(options: argparse.Namespace, task: str, arm: str, seed: int) -> bool:
    print(f"{task} {arm} seed {seed}", file=sys.stderr, flush=True)
    folder = Path(getattr(options, DATA[task]))
    command = [sys.executable, str(TRAIN), task, arm, str(seed), f"--{DATA[task]}", str(folder)]
    done = subprocess.run([*command, "--runs", str(options.runs)], check=False)  # noqa: S603 - ours
    return done.returncode == 0


def _measure(options: argparse.Namespace, task: str, arm: str, seed: int) -> None:
    """The final accuracy of a run, once."""
    run = _load(options.runs, task, arm, seed)
    if run is None or run.measured is not None:
        return
    file = options.runs / f"{task}-{arm}-{seed}.json"
    measured = final_knn(task, file.with_suffix(".pt"), options.images)
    result = json.loads(file.read_text(encoding="utf-8")) | {"measured": measured}
    file.write_text(json.dumps(result) + "\n", encoding="utf-8")


def _load(folder: Path, task: str, arm: str, seed: int) -> Run | None:
    """A run with the present setting, if it is there."""
    try:
        result: dict[str, Any] = json.loads((folder / f"{task}-{arm}-{seed}.json").read_text())
    except FileNotFoundError:
        return None
    if result["setting"] != asdict(TASKS[task]):
        return None
    return Run(task, arm, seed, result["curves"], TASKS[task].metric, result.get("measured"))


def _largest_differences(folder: Path, runs: list[Run]) -> dict[str, float]:
    """Of the distillation, TSPipe's student against the vanilla one, relative to each tensor."""
    seeds = {arm: {r.seed for r in runs if (r.task, r.arm) == ("kd", arm)} for arm in ARMS}
    differences = []
    for seed in seeds["vanilla"] & seeds["tspipe"]:
        vanilla, ours = (
            torch.load(folder / f"kd-{arm}-{seed}.pt") for arm in ("vanilla", "tspipe")
        )
        differences += [
            ((ours[name] - value).norm() / value.norm()).item() for name, value in vanilla.items()
        ]
    return {"kd.largest_relative_difference": max(differences)} if differences else {}


def _write(path: Path, runs: list[Run], results: dict[str, float]) -> None:
    content = {
        "environment": environment_of(PACKAGES),
        "settings": {task: asdict(setting) for task, setting in TASKS.items()},
        "figures": results,
        "rows": [asdict(run) for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    plot_curves(mean_curves(runs), path.with_suffix(".png"))
    path.with_suffix(".txt").write_text(table(runs) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
