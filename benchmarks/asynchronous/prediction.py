"""How far predicted weights are from what weights become, in a training on one device.

After update t, W of t + s is predicted as a forward would do it, and compared when it is there. The
error is given as a share of the error without a prediction, which is how far the weights move.

What can be expected: an optimizer's average v of gradients (v becomes 0.9 v + g) says nothing about
gradients to come. Where these are noise without a direction, W moves by (0.9 + 0.81 + ...) v and by
weighted sums of s new gradients; the rule subtracts s v. :func:`expected` computes the share.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from math import hypot, sqrt
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.asynchronous.tasks import NUM_STAGES, TASKS, Classifier, Task, tasks_of
from benchmarks.asynchronous.train import batches, data
from benchmarks.environment import environment_of
from lightning_tspipe.runtime.weights.prediction import predicted_update

MOMENTUM = 0.9
"""Of all three optimizers; of Adam's the first average."""
STEPS = tuple(range(1, NUM_STAGES))

Values = list[Tensor]
Shares = dict[int, float]


def measure(options: argparse.Namespace) -> int:
    """Train each task once, print and write; returns the exit status."""
    torch.set_num_threads(1)
    rows: dict[str, Shares] = {"if noise alone": {s: expected(s) for s in STEPS}}
    rows["the best, then"] = {s: expected(s, best=True) for s in STEPS}
    for name, task in tasks_of(options.batch_size).items():
        folder = getattr(options, task.data)
        if folder is not None and name in (options.tasks or TASKS):
            rows[name] = shares(task, options.seeds[0], folder)
    text = table_of(rows)
    print(text)
    if options.json is not None:
        content = {
            "environment": environment_of(("torch", "torchvision")),
            "figures": {
                f"prediction_error.{name}.{steps}": share
                for name, found in rows.items()
                for steps, share in found.items()
                if name in TASKS
            },
            "rows": [{"training": name, "share": found} for name, found in rows.items()],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.json.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    return 0


def expected(steps: int, *, best: bool = False) -> float:
    """The share of the error that is left where gradients are noise.

    Args:
        steps: Updates that are predicted.
        best: Of the best multiple of v, in the place of the rule's.
    """
    average = 1 / sqrt(1 - MOMENTUM**2)
    moved = sum(MOMENTUM**n for n in range(1, steps + 1))
    sums = [sum(MOMENTUM**n for n in range(after + 1)) for after in range(steps)]
    fresh = sqrt(sum(value**2 for value in sums))
    left = 0.0 if best else (steps - moved) * average
    return hypot(left, fresh) / hypot(moved * average, fresh)


def shares(task: Task, seed: int, folder: Path) -> Shares:
    """One training; by how many updates were predicted, the mean error over the mean movement."""
    (inputs, labels), _ = data(task, folder)
    torch.manual_seed(seed)
    module = Classifier(task)
    parameters = list(module.parameters())
    optimizer = task.optimizer(parameters, task.rate.peak)
    epochs = list(batches(inputs, labels, task, seed))
    schedule = task.rate.schedule(optimizer, len(epochs[0]), task.epochs)
    due: dict[int, list[tuple[int, Values, Values]]] = defaultdict(list)
    errors, movements = dict.fromkeys(STEPS, 0.0), dict.fromkeys(STEPS, 0.0)
    (group,) = optimizer.param_groups
    for update, batch in enumerate(batch for epoch in epochs for batch in epoch):
        optimizer.zero_grad()
        module.training_step(batch).backward()
        optimizer.step()
        schedule.step()
        now = [p.detach().clone() for p in parameters]
        for steps, before, guess in due.pop(update, ()):
            errors[steps] += _distance(guess, now)
            movements[steps] += _distance(before, now)
        changes = [predicted_update(optimizer, p, group) for p in parameters]
        known = [torch.zeros_like(p) if c is None else c for p, c in zip(now, changes, strict=True)]
        for steps in STEPS:
            guess = [p - steps * change for p, change in zip(now, known, strict=True)]
            due[update + steps].append((steps, now, guess))
    return {steps: errors[steps] / movements[steps] for steps in STEPS}


def table_of(rows: dict[str, Shares]) -> str:
    """A line for each training, a column for each number of updates."""
    lines = ["error of the prediction / of none, by updates", f"{'':<15}{'1':>6}{'2':>6}{'3':>6}"]
    for name, found in rows.items():
        lines.append(f"{name:<15}" + "".join(f"{found[steps]:6.2f}" for steps in STEPS))
    return "\n".join(lines)


def _distance(mine: Values, theirs: Values) -> float:
    return float(sum(((a - b) ** 2).sum() for a, b in zip(mine, theirs, strict=True)) ** 0.5)
