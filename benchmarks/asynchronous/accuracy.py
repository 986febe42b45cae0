"""Trains what is missing, and compares: final accuracy, and epochs to a target."""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch

from benchmarks.asynchronous.curves import draw
from benchmarks.asynchronous.entries import POLICIES
from benchmarks.asynchronous.tasks import TASKS, Task
from benchmarks.asynchronous.train import BASELINE, accuracies
from benchmarks.environment import environment_of

ARMS = (BASELINE, *POLICIES)
TARGET = 0.98
"""Of the baseline's mean final accuracy: epochs until an arm's mean reaches it."""

Key = tuple[str, str, int]


def measure(options: argparse.Namespace) -> int:
    """Train, print and write; returns the exit status."""
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    tasks = [task for task in options.tasks or TASKS if _folder(options, task) is not None]
    wanted = () if options.present else product(options.seeds, tasks, options.arms or ARMS)
    for seed, task, arm in wanted:
        # SpecTrain is defined for SGD with momentum only.
        if arm == "spectrain" and task != "resnet":
            continue
        with _claimed(options.runs / f"{task}-{arm}-{seed}.lock") as is_mine:
            if is_mine and _load(options, (task, arm, seed)) is None:
                _train(options, task, arm, seed)
    keys: list[Key] = list(product(options.tasks or TASKS, ARMS, options.seeds))
    runs = {key: curve for key in keys if (curve := _load(options, key)) is not None}
    figures = figures_of(runs)
    table = table_of(runs, figures)
    print(table)
    if options.json is not None:
        rows = [
            {"task": task, "arm": arm, "seed": seed, "accuracy": curve}
            for (task, arm, seed), curve in runs.items()
        ]
        settings = {name: _setting(options, TASKS[name]) for name in {key[0] for key in runs}}
        content = {
            "environment": environment_of(("torch", "torchvision")),
            "settings": dict(sorted(settings.items())), "figures": figures, "rows": rows,
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.json.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
    if options.image is not None:
        draw(runs, options.image)
    return 0


def figures_of(runs: dict[Key, list[float]]) -> dict[str, float]:
    """``accuracy.{task}.{arm}``, how many seeds and their deviation, and epochs to the target."""
    found: dict[str, float] = {}
    for task, arm in product(TASKS, ARMS):
        curves = [curve for (t, a, _), curve in runs.items() if (t, a) == (task, arm)]
        if not curves:
            continue
        finals = [curve[-1] for curve in curves]
        found[f"accuracy.{task}.{arm}"] = mean(finals)
        found[f"accuracy.{task}.{arm}.seeds"] = len(finals)
        if len(finals) > 1:
            found[f"accuracy.{task}.{arm}.deviation"] = stdev(finals)
        target = TARGET * found.get(f"accuracy.{task}.gpipe1", 1.0)
        means = [mean(values) for values in zip(*curves, strict=True)]
        reached = next((e for e, value in enumerate(means, 1) if value >= target), None)
        if reached is not None:
            found[f"epochs_to_target.{task}.{arm}"] = reached
    return found


def table_of(runs: dict[Key, list[float]], figures: dict[str, float]) -> str:
    """A line for each task and arm: final accuracies, seed by seed, and epochs to the target."""
    lines = ["task    arm        mean   deviation  epochs to target  seed by seed"]
    for task, arm in product(TASKS, ARMS):
        name = f"{task}.{arm}"
        if f"accuracy.{name}" not in figures:
            continue
        deviation = figures.get(f"accuracy.{name}.deviation")
        shown = "-" if deviation is None else f"{deviation:.3f}"
        epochs = figures.get(f"epochs_to_target.{name}", "-")
        seeds = " ".join(
            f"{curve[-1]:.3f}" for (t, a, _), curve in sorted(runs.items()) if (t, a) == (task, arm)
        )
        mean_text = f"{figures[f'accuracy.{name}']:.3f}"
        lines.append(f"{task:<7} {arm:<10} {mean_text}  {shown:<9}  {epochs!s:<16}  {seeds}")
    return "\n".join(lines)


def _folder(options: argparse.Namespace, task: str) -> Path | None:
    folder: Path | None = getattr(options, TASKS[task].data)
    return folder


def _setting(options: argparse.Namespace, task: Task) -> dict[str, int]:
    return {
        "samples": options.samples or task.num_samples,
        "epochs": options.epochs or task.epochs,
    }


@contextmanager
def _claimed(lock: Path) -> Iterator[bool]:
    """Whether this process may train a run; another one that looks meanwhile may not."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _train(options: argparse.Namespace, name: str, arm: str, seed: int) -> None:
    print(f"{name} {arm} seed {seed}", file=sys.stderr, flush=True)
    setting, folder = _setting(options, TASKS[name]), _folder(options, name)
    assert folder is not None
    task = replace(TASKS[name], num_samples=setting["samples"], epochs=setting["epochs"])
    result = {"setting": setting, "accuracy": accuracies(task, arm, seed, folder)}
    file = options.runs / f"{name}-{arm}-{seed}.json"
    # Whole or not at all, should this process end.
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    unfinished.replace(file)


def _load(options: argparse.Namespace, key: Key) -> list[float] | None:
    """A run with the present setting, if it is there."""
    task, arm, seed = key
    try:
        result = json.loads((options.runs / f"{task}-{arm}-{seed}.json").read_text())
    except FileNotFoundError:
        return None
    curve: list[float] = result["accuracy"]
    return curve if result["setting"] == _setting(options, TASKS[task]) else None
