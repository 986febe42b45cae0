"""``tspipe plot``: draw what a logger has written, against steps and against time."""

from __future__ import annotations

import argparse
import csv
import re
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plots import Curve, plot_curves

_FILE = "metrics.csv"
_CLOCK = "elapsed"
_INTERESTING = re.compile(r"loss|knn|probe|top\d|acc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tspipe plot``."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN",
        help=f"the {_FILE} of a CSVLogger, or its folder; several are drawn together",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", nargs="+", metavar="NAME",
        help="what to draw (by default losses and accuracies)",
    )  # fmt: skip
    parser.add_argument(
        "--image", type=Path, default=Path("curves.png"), help="the drawing: .png, .svg or .pdf"
    )


def run(options: argparse.Namespace) -> None:
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
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = [name for name in reader.fieldnames or () if name not in {"step", "epoch"}]
        if "step" not in (reader.fieldnames or ()):
            raise ConfigurationError(f"{path} has no column 'step', as a CSVLogger writes it")
        rows = list(reader)
    points = {name: _points(rows, name) for name in names}
    clock = sorted(points.pop(_CLOCK, []))
    return {
        name: Curve(
            tuple(step for step, _ in found),
            tuple(_seconds_at(step, clock) for step, _ in found) if clock else (),
            tuple(value for _, value in found),
        )
        for name, found in points.items()
        if found
    }


def _points(rows: Sequence[dict[str, str]], name: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[name])) for row in rows if row[name]]


def _seconds_at(step: float, clock: Sequence[tuple[float, float]]) -> float:
    place = bisect_left(clock, (step, 0.0))
    if place == len(clock):
        return clock[-1][1]
    later_step, later = clock[place]
    earlier_step, earlier = clock[place - 1] if place else (0.0, 0.0)
    if later_step <= earlier_step:
        return later
    return earlier + (later - earlier) * (step - earlier_step) / (later_step - earlier_step)


def _labels(paths: Sequence[Path]) -> list[str]:
    """Short names of the runs: those of their folders, if they differ."""
    names = [path.parent.name or path.stem for path in paths]
    if len(set(names)) == len(names):
        return names
    return [str(path.parent) for path in paths]
