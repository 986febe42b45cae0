"""What the runs say: ratios of seconds, and a difference of accuracies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

EMULATED = ("baseline", "cache", "repack", "freeze", "unpipelined", "balanced")
REAL = ("baseline", "freeze", "repack", "cache")
ACCURATE = ("baseline", "cache")
NUM_EPOCHS = 10
"""Of an emulated fine-tuning: the last of the measured ones stands for all that follow."""

Run = Mapping[str, Any]
Key = tuple[str, float | int]
"""A method, and the number of its run: a round, a seed or a learning rate."""


def figures_of_emulated(runs: Mapping[str, Run], devices: int) -> dict[str, float]:
    """Ratios of the seconds of all steps; transitions are figures of their own.

    Args:
        runs: By method: the ``seconds`` of a step in each epoch, the ``history`` of freezing, and
            the ``ideal`` seconds if no device ever waited or did anything twice. The baseline, and
            those of the others that have been measured.
        devices: How many there were.
    """
    totals = {method: total(run["seconds"]) for method, run in runs.items()}
    key = f"emulated.{devices}"
    found = {
        f"{key}.{name}_over_baseline": totals["baseline"] / totals[method]
        for name, method in (("freeze", "freeze"), ("repack", "repack"), ("total", "cache"))
        if method in runs
    }
    if "cache" in runs:
        found[f"{key}.ideal_over_baseline"] = totals["baseline"] / total(runs["cache"]["ideal"])
        if "balanced" in runs:
            found[f"{key}.total_over_balanced"] = totals["balanced"] / totals["cache"]
    changes = [
        entry["seconds"]
        for method in ("freeze", "repack", "cache")
        if method in runs
        for entry in runs[method]["history"]
    ]
    if changes:
        found |= {"transition_seconds": max(changes), "transition_seconds_median": median(changes)}
    if {"freeze", "unpipelined"} <= runs.keys():
        frozen = {method: sum(runs[method]["seconds"][1:]) for method in ("freeze", "unpipelined")}
        found["prefix_in_bubbles_over_unpipelined"] = frozen["unpipelined"] / frozen["freeze"]
    return found


def total(seconds: Sequence[float]) -> float:
    """Of a step of each epoch; epochs of thousands of steps, beside which a transition is short.

    >>> total([2.0, 1.0])
    11.0
    """
    return sum(seconds) + (NUM_EPOCHS - len(seconds)) * seconds[-1]


def figures_of_real(runs: Mapping[Key, Run]) -> dict[str, float]:
    """How many times faster than without freezing: medians of the ratios of each round.

    Args:
        runs: By method and round: the ``seconds`` from the first step to the last one.
    """
    found = {}
    for method in REAL[1:]:
        rounds = [number for one, number in runs if one == method]
        if rounds:
            found[f"real.{method}_over_baseline"] = median(
                runs["baseline", n]["seconds"] / runs[method, n]["seconds"] for n in rounds
            )
    return found


def figures_of_accuracy(runs: Mapping[Key, Run]) -> dict[str, float]:
    """Percentage points, with freezing minus without: mean over the seeds, and its deviation.

    Args:
        runs: By method and seed: the ``accuracy`` at the end.
    """
    seeds = [seed for method, seed in runs if method == "cache"]
    gained = [
        100.0 * (runs["cache", n]["accuracy"] - runs["baseline", n]["accuracy"]) for n in seeds
    ]
    if len(gained) < 2:
        return {"real.accuracy_difference": gained[0]} if gained else {}
    return {
        "real.accuracy_difference": mean(gained),
        "real.accuracy_difference_standard_error": stdev(gained) / len(gained) ** 0.5,
    }


def figures_of_tuning(runs: Mapping[Key, Run]) -> dict[str, float]:
    """The learning rate with which the baseline is best on images that are not those of the test.

    Args:
        runs: By method and learning rate: the ``accuracy`` at the end.
    """
    best = max(runs, key=lambda key: float(runs[key]["accuracy"]))
    return {"real.learning_rate": best[1]}
