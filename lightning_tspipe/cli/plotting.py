"""``tspipe plot``: draw what a logger has written, against steps and against time."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_tspipe.cli.modules import read
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plots import Curve, plot_curves, timed_curves

_FILE = "metrics.csv"
_CLOCK = "elapsed"
_INTERESTING = re.compile(r"loss|knn|probe|top\d|acc")


@dataclass(frozen=True)
class Options:
    """Options of ``tspipe plot``.

    Attributes:
        runs: the metrics.csv of a CSVLogger, or its folder; several are drawn together
        metrics: what to draw (by default losses and accuracies)
        image: the drawing: .png, .svg or .pdf
    """

    runs: list[Path]
    metrics: list[str] | None = None
    image: Path = Path("curves.png")


def run(options: Options) -> None:
    """Draw the curves of one or several runs."""
    paths = [path / _FILE if path.is_dir() else path for path in options.runs]
    curves: dict[str, dict[str, Curve]] = {}
    for label, path in zip(_labels(paths), paths, strict=True):
        for metric, curve in read_curves(path).items():
            curves.setdefault(metric, {})[label] = curve
    wanted = options.metrics or [name for name in curves if _INTERESTING.search(name)]
    unknown = [name for name in wanted if name not in curves]
    if unknown or not wanted:
        raise ConfigurationError(
            f"no run has {', '.join(unknown) or 'a loss or an accuracy'}; choose --metrics among "
            f"{', '.join(sorted(curves)) or 'nothing: the files are empty'}"
        )
    plot_curves({name: curves[name] for name in wanted}, options.image)
    print(options.image)  # noqa: T201 - the command's output


def read_curves(path: Path) -> dict[str, Curve]:
    """The metrics of a run, by name.

    Seconds are those that a ``PipelineThroughputMonitor`` logged, interpolated between steps.

    Args:
        path: A file of Lightning's ``CSVLogger``.

    Raises:
        ConfigurationError: There is no such file, or it has no column ``step``.
    """
    reader = csv.DictReader(read(path).splitlines())
    if "step" not in (reader.fieldnames or ()):
        raise ConfigurationError(f"{path} has no column 'step': give a CSVLogger's metrics.csv")
    points: dict[str, list[tuple[float, float]]] = {}
    for row in reader:
        for name in [name for name in row if name not in {"step", "epoch"} and row[name]]:
            points.setdefault(name, []).append((float(row["step"]), float(row[name])))
    clock = sorted(points.pop(_CLOCK, []))
    return timed_curves(points, clock)


def _labels(paths: Sequence[Path]) -> list[str]:
    """Short names of the runs: those of their folders, if they differ."""
    names = [path.parent.name or path.stem for path in paths]
    if len(set(names)) == len(names):
        return names
    return [str(path.parent) for path in paths]
