"""Trains what is missing, and compares: final accuracy, epochs and time to a target.

The learning rates of a task are tried on the baseline alone, with one seed::

    --arms gpipe1 --seeds 0 --rates 0.1 0.05 0.02 0.01

The arms are then compared at the rate which ``tasks.py`` names; rows of others stay in the table.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch

from benchmarks.asynchronous.curves import draw
from benchmarks.asynchronous.entries import POLICIES
from benchmarks.asynchronous.tasks import TASKS, Rate, Task, tasks_of
from benchmarks.asynchronous.train import BASELINE, IN_PARTS, accuracies
from benchmarks.environment import environment_of

ARMS = (BASELINE, IN_PARTS, *POLICIES)
_LEFT_OUT = {"spectrain": ("vgg", "lstm"), IN_PARTS: ("lstm",)}
TARGET = 0.98
"""Of the baseline's mean final accuracy: epochs until an arm's mean reaches it."""
SPEEDS = Path(__file__).parents[1] / "async" / "results" / "latest.json"
"""The measured throughputs; of these the emulated ones, of four devices, over GPipe's."""


class Key(NamedTuple):
    """Which run."""

    task: str
    rate: Rate
    arm: str
    seed: int


Runs = Mapping[Key, list[float]]


def measure(options: argparse.Namespace) -> int:
    """Train, print and write; returns the exit status."""
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    for key in () if options.present else _wanted(options):
        with _claimed(options.runs / f"{_name(options, key)}.lock") as is_mine:
            if is_mine and _load(options, key) is None:
                _train(options, key)
    tasks = tasks_of(options.batch_size)
    keys = [
        Key(task, rate, arm, seed)
        for task in options.tasks or tasks
        for rate, arm, seed in product(tasks[task].rates, ARMS, options.seeds)
    ]
    runs = {key: curve for key in keys if (curve := _load(options, key)) is not None}
    speeds = json.loads(SPEEDS.read_text(encoding="utf-8"))["figures"]
    figures = figures_of(runs, tasks, speeds)
    table = table_of(runs, figures, tasks)
    print(table)
    if options.json is not None:
        rows = [
            {**key._asdict(), "rate": str(key.rate), "accuracy": curve}
            for key, curve in runs.items()
        ]
        settings = {
            name: {**_setting(options, tasks[name]), "rate": str(tasks[name].rate)}
            for name in {key.task for key in runs}
        }
        content = {
            "environment": environment_of(("torch", "torchvision")),
            "settings": dict(sorted(settings.items())), "figures": figures, "rows": rows,
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.json.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
    if options.image is not None:
        own = {key: curve for key, curve in runs.items() if key.rate == tasks[key.task].rate}
        draw({(key.task, key.arm, key.seed): curve for key, curve in own.items()}, options.image)
    return 0


def figures_of(
    runs: Runs, tasks: Mapping[str, Task] = TASKS, speeds: Mapping[str, float] | None = None
) -> dict[str, float]:
    """``accuracy.{task}.{arm}``, how many seeds and their deviation, and what the target took.

    Those of another learning rate than the task's are named ``accuracy.{task}.rate_{rate}.{arm}``.

    Args:
        runs: Those that are there.
        tasks: With the rates at which arms are compared.
        speeds: ``emulated.4.{policy}_over_gpipe4``, the throughputs over that of GPipe with 4
            micro-batches, which trains what the baseline trains.

    Returns:
        ``epochs_to_target`` as trained; ``time_to_target`` those over the throughput, as a multiple
        of the baseline's; neither for arms that don't get there.
    """
    found: dict[str, float] = {}
    synchronous = (f"emulated.4.{arm}_over_gpipe4" for arm in (BASELINE, IN_PARTS))
    known = {**dict.fromkeys(synchronous, 1.0), **(speeds or {})}
    for (task, rate, arm), curves in _by_arm(runs, tasks).items():
        where = _where(task, rate, tasks)
        name = f"{where}.{arm}"
        finals = [curve[-1] for curve in curves]
        found[f"accuracy.{name}"] = mean(finals)
        found[f"accuracy.{name}.seeds"] = len(finals)
        if len(finals) > 1:
            found[f"accuracy.{name}.deviation"] = stdev(finals)
        target = TARGET * found.get(f"accuracy.{where}.{BASELINE}", 1.0)
        means = [mean(values) for values in zip(*curves, strict=True)]
        reached = next((e for e, value in enumerate(means, 1) if value >= target), None)
        if reached is None:
            continue
        found[f"epochs_to_target.{name}"] = reached
        speed = known.get(f"emulated.4.{arm}_over_gpipe4")
        needed = found.get(f"epochs_to_target.{where}.{BASELINE}")
        if speed is not None and needed is not None:
            found[f"time_to_target.{name}"] = reached / speed / needed
    return found


def table_of(runs: Runs, figures: Mapping[str, float], tasks: Mapping[str, Task] = TASKS) -> str:
    """A line for each task, rate and arm: final accuracies, and what the target took."""
    lines = ["task    rate    arm        mean   deviation  epochs, time to target  seed by seed"]
    for (task, rate, arm), curves in _by_arm(runs, tasks).items():
        where = _where(task, rate, tasks)
        deviation = figures.get(f"accuracy.{where}.{arm}.deviation")
        shown = "-" if deviation is None else f"{deviation:.3f}"
        epochs = figures.get(f"epochs_to_target.{where}.{arm}", "-")
        time = figures.get(f"time_to_target.{where}.{arm}")
        time_text = "-" if time is None else f"{time:.2f}"
        seeds = " ".join(f"{curve[-1]:.3f}" for curve in curves)
        mean_text = f"{figures[f'accuracy.{where}.{arm}']:.3f}"
        lines.append(
            f"{task:<7} {rate!s:<7} {arm:<10} {mean_text}  {shown:<9}  {epochs!s:<6}  "
            f"{time_text:<14}  {seeds}"
        )
    return "\n".join(lines)


def _where(task: str, rate: Rate, tasks: Mapping[str, Task]) -> str:
    return task if rate == tasks[task].rate else f"{task}.rate_{rate}"


def _by_arm(
    runs: Runs, tasks: Mapping[str, Task]
) -> dict[tuple[str, Rate, str], list[list[float]]]:
    """The curves of each task, rate and arm; the task's own rate first, the baseline first."""
    found: dict[tuple[str, Rate, str], list[list[float]]] = {}
    for task, own in tasks.items():
        rates = {key.rate for key in runs if key.task == task}
        ordered = sorted(rates, key=lambda rate: (rate != own.rate, -rate.peak, rate.warmup))
        for rate, arm in product(ordered, ARMS):
            curves = [runs[key] for key in sorted(runs) if key[:3] == (task, rate, arm)]
            if curves:
                found[task, rate, arm] = curves
    return found


def _wanted(options: argparse.Namespace) -> Iterator[Key]:
    tasks = [task for task in options.tasks or TASKS if _folder(options, task) is not None]
    rates = tasks_of(options.batch_size)
    for seed, task, arm in product(options.seeds, tasks, options.arms or ARMS):
        # SpecTrain is defined for SGD with momentum only; an LSTM has no BatchNorm.
        if task not in _LEFT_OUT.get(arm, ()):
            for rate in map(Rate.parse, options.rates or [str(rates[task].rate)]):
                yield Key(task, rate, arm, seed)


def _name(options: argparse.Namespace, key: Key) -> str:
    return f"{key.task}-{options.batch_size}-{key.rate}-{key.arm}-{key.seed}"


def _folder(options: argparse.Namespace, task: str) -> Path | None:
    folder: Path | None = getattr(options, TASKS[task].data)
    return folder


def _setting(options: argparse.Namespace, task: Task) -> dict[str, int]:
    tests = {"num_tests": task.num_tests} if task.data == "images" else {}
    return {
        "batch_size": task.batch_size,
        **tests,
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


def _train(options: argparse.Namespace, key: Key) -> None:
    print(_name(options, key), file=sys.stderr, flush=True)
    own, folder = tasks_of(options.batch_size)[key.task], _folder(options, key.task)
    setting = _setting(options, own)
    assert folder is not None
    task = replace(
        own,
        num_samples=setting["samples"],
        epochs=setting["epochs"],
        rate=key.rate,
    )
    result = {"setting": setting, "accuracy": accuracies(task, key.arm, key.seed, folder)}
    file = options.runs / f"{_name(options, key)}.json"
    # Whole or not at all, should this process end.
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    unfinished.replace(file)


def _load(options: argparse.Namespace, key: Key) -> list[float] | None:
    """A run with the present setting, if it is there."""
    try:
        result = json.loads((options.runs / f"{_name(options, key)}.json").read_text())
    except FileNotFoundError:
        return None
    curve: list[float] = result["accuracy"]
    wanted = _setting(options, tasks_of(options.batch_size)[key.task])
    return curve if result["setting"] == wanted else None
