"""Trains what is missing, and compares: final accuracy, and epochs to a target."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean, stdev

from benchmarks.asynchronous.entries import POLICIES
from benchmarks.asynchronous.tasks import TASKS
from benchmarks.environment import environment_of

ARMS = ("gpipe1", *POLICIES)
TRAIN = Path(__file__).with_name("train.py")
TARGET = 0.98
"""Of the baseline's mean final accuracy: epochs until an arm's mean reaches it."""

Key = tuple[str, str, int]


def measure(options: argparse.Namespace) -> int:
    """Train, print and write; returns the exit status."""
    tasks = [task for task in options.tasks or TASKS if _folder(options, task) is not None]
    failed = False
    for seed, task, arm in product(options.seeds, tasks, options.arms or ARMS):
        # SpecTrain is defined for SGD with momentum only.
        if arm == "spectrain" and task != "resnet":
            continue
        if _load(options, (task, arm, seed)) is None:
            failed |= not _train(options, task, arm, seed)
    keys: list[Key] = [key for key in product(tasks, ARMS, options.seeds)]  # noqa: C416 - its type
    runs = {key: curve for key in keys if (curve := _load(options, key)) is not None}
    figures = figures_of(runs)
    print("\n".join(f"{name}: {value:.4f}" for name, value in figures.items()))
    if options.json is not None:
        rows = [
            {"task": task, "arm": arm, "seed": seed, "accuracy": curve}
            for (task, arm, seed), curve in runs.items()
        ]
        content = {
            "environment": environment_of(("torch", "torchvision", "lightning")),
            "figures": figures, "rows": rows,
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(failed)


def figures_of(runs: dict[Key, list[float]]) -> dict[str, float]:
    """``accuracy.{task}.{arm}``, its deviation over seeds, and epochs to the target."""
    found: dict[str, float] = {}
    for task, arm in product(TASKS, ARMS):
        curves = [curve for (t, a, _), curve in runs.items() if (t, a) == (task, arm)]
        if not curves:
            continue
        finals = [curve[-1] for curve in curves]
        found[f"accuracy.{task}.{arm}"] = mean(finals)
        if len(finals) > 1:
            found[f"accuracy.{task}.{arm}.deviation"] = stdev(finals)
        target = TARGET * found.get(f"accuracy.{task}.gpipe1", 1.0)
        means = [mean(values) for values in zip(*curves, strict=True)]
        reached = next((e for e, value in enumerate(means, 1) if value >= target), None)
        if reached is not None:
            found[f"epochs_to_target.{task}.{arm}"] = reached
    return found


def _folder(options: argparse.Namespace, task: str) -> Path | None:
    folder: Path | None = getattr(options, TASKS[task].data)
    return folder


def _train(options: argparse.Namespace, task: str, arm: str, seed: int) -> bool:
    print(f"{task} {arm} seed {seed}", file=sys.stderr, flush=True)
    command = [sys.executable, str(TRAIN), task, arm, str(seed), "--data",
               str(_folder(options, task)), "--runs", str(options.runs)]  # fmt: skip
    for name in ("samples", "epochs"):
        if getattr(options, name) is not None:
            command += [f"--{name}", str(getattr(options, name))]
    return subprocess.run(command, check=False).returncode == 0  # noqa: S603 - ours


def _load(options: argparse.Namespace, key: Key) -> list[float] | None:
    """A run with the present setting, if it is there."""
    task, arm, seed = key
    try:
        result = json.loads((options.runs / f"{task}-{arm}-{seed}.json").read_text())
    except FileNotFoundError:
        return None
    wanted = {
        "samples": options.samples or TASKS[task].num_samples,
        "epochs": options.epochs or TASKS[task].epochs,
    }
    curve: list[float] = result["accuracy"]
    return curve if result["setting"] == wanted else None
