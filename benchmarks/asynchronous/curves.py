"""The drawing of the accuracy curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from lightning_tspipe.plots import Curve, plot_curves


def draw(runs: Mapping[tuple[str, str, int], list[float]], path: Path) -> None:
    """Accuracy against epochs, for each task one drawing, for each arm the mean of its seeds.

    Args:
        runs: Accuracies by task, arm and seed.
        path: File to write.
    """
    metrics: dict[str, dict[str, Curve]] = {}
    for task, arm in sorted({(task, arm) for task, arm, _ in runs}):
        curves = [curve for (t, a, _), curve in runs.items() if (t, a) == (task, arm)]
        means = tuple(map(mean, zip(*curves, strict=True)))
        epochs = tuple(float(epoch) for epoch in range(1, len(means) + 1))
        metrics.setdefault(task, {})[arm] = Curve(epochs, (), means)
    if metrics:
        plot_curves(metrics, path, axis="epochs")
