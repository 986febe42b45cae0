"""What the runs say: ratios of seconds, and a difference of accuracies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

EMULATED = ("baseline", "freeze", "unpipelined", "repack", "cache")
REAL = ("baseline", "freeze", "repack", "cache")
ACCURATE = ("baseline", "cache")
NUM_EPOCHS = 10
"""Of an emulated fine-tuning: the last of the measured ones stands for all that follow."""

Run = Mapping[str, Any]


def figures_of_emulated(runs: Mapping[str, Run], devices: int) -> dict[str, float]:
    """Ratios of the seconds of all steps; transitions are figures of their own.

    Args:
        runs: By method: the ``seconds`` of a step in each epoch, the ``history`` of freezing, and
            the ``ideal`` seconds if no device ever waited or did anything twice.
        devices: How many there were.
    """
    totals = {method: total(run["seconds"]) for method, run in runs.items()}
    key = f"emulated.{devices}"
    ratios = {
        f"{key}.freeze_over_baseline": totals["baseline"] / totals["freeze"],
        f"{key}.repack_over_baseline": totals["baseline"] / totals["repack"],
        f"{key}.total_over_baseline": totals["baseline"] / totals["cache"],
        f"{key}.ideal_over_baseline": totals["baseline"] / total(runs["cache"]["ideal"]),
    }
    changes = [
        entry["seconds"]
        for method in ("repack", "cache")
        for entry in runs[method]["history"]
        if entry["num_replicas"] > 1
    ]
    frozen = {method: sum(runs[method]["seconds"][1:]) for method in ("freeze", "unpipelined")}
    return ratios | {
        "transition_seconds": max(changes),
        "transition_seconds_median": median(changes),
        "prefix_in_bubbles_over_unpipelined": frozen["unpipelined"] / frozen["freeze"],
    }


def total(seconds: Sequence[float]) -> float:
    """Of a step of each epoch; epochs of thousands of steps, beside which a transition is short.

    >>> total([2.0, 1.0])
    11.0
    """
    return sum(seconds) + (NUM_EPOCHS - len(seconds)) * seconds[-1]


def figures_of_real(runs: Mapping[tuple[str, int], Run]) -> dict[str, float]:
    """How many times faster than without freezing: medians of the ratios of each round.

    Args:
        runs: By method and round: the ``seconds`` from the first step to the last one.
    """
    rounds = sorted({number for _, number in runs})
    return {
        f"real.{method}_over_baseline": median(
            runs["baseline", n]["seconds"] / runs[method, n]["seconds"] for n in rounds
        )
        for method in REAL[1:]
    }


def accuracy_difference(runs: Mapping[tuple[str, int], Run]) -> float:
    """Percentage points: with freezing minus without, mean over the seeds.

    Args:
        runs: By method and seed: the ``accuracy`` at the end.
    """
    seeds = sorted({seed for _, seed in runs})
    gained = [runs["cache", n]["accuracy"] - runs["baseline", n]["accuracy"] for n in seeds]
    return 100.0 * float(mean(gained))
