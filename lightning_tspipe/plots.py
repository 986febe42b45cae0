"""Drawings of timelines and metrics. They need ``pip install lightning-tspipe[plots]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.simulation.timeline import Span, Timeline, aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

# Actions that run ahead for the next batch have a light tint of their op's colour.
STYLES = {
    Op.FORWARD: ("student forward", "#0072B2"),
    Op.TEACHER: ("teacher forward", "#E69F00"),
    Op.BACKWARD: ("backward", "#009E73"),
    Op.INPUT_BACKWARD: ("backward, inputs", "#56B4E9"),
    Op.WEIGHT_BACKWARD: ("backward, weights", "#7FC8AE"),
    Op.LOSS: ("loss", "#D55E00"),
    Op.OPTIMIZER: ("optimizer", "#CC79A7"),
    Op.EFFECTS: ("effects of the step", "#999999"),
    Op.DATA: ("data", "#5A5A5A"),
    Op.PROLOGUE: ("prologue", "#F0E442"),
}
"""Name and colour of each op: Okabe and Ito's palette, for colour-blind readers."""
AHEAD_OPACITY = 0.45
_RUN_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#5A5A5A")
_BAR_HEIGHT = 0.74
_CHARACTER_POINTS = 5.2  # width of a digit at the labels' size
_LABEL_POINTS = 8
_WIDTH_INCHES = 12.0


@dataclass(frozen=True)
class Curve:
    """A metric of one run.

    Attributes:
        steps: Steps at which it was logged.
        seconds: Seconds since the start of training; empty if unknown.
        values: Logged values.
    """

    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]


def timed_curves(
    points: Mapping[str, Sequence[tuple[float, float]]], clock: Sequence[tuple[float, float]]
) -> dict[str, Curve]:
    """Curves of logged metrics, with the seconds at which their steps were done.

    Args:
        points: Steps and values, by metric.
        clock: Steps and the seconds of training up to them, ascending, between which seconds are
            interpolated; empty: times are unknown.
    """
    known = np.array([(0.0, 0.0), *clock])  # a run begins at step 0 and second 0
    curves = {}
    for name, found in points.items():
        steps, values = zip(*found, strict=True)
        seconds = np.interp(steps, known[:, 0], known[:, 1]) if len(clock) else ()
        curves[name] = Curve(steps, tuple(map(float, seconds)), values)
    return curves


def plot_curves(
    metrics: Mapping[str, Mapping[str, Curve]], path: str | Path, *, axis: str = "steps"
) -> None:
    """Draw metrics into a file, as :func:`draw_curves` does.

    Args:
        metrics: Curves by metric, then by run.
        path: File to write; its suffix chooses the format (``.png``, ``.svg``, ``.pdf``).
        axis: Label of the axis of steps.

    Raises:
        ConfigurationError: matplotlib is not installed, the suffix is not a known format, or there
            is no curve.
    """
    _save(draw_curves(metrics, axis=axis), Path(path))


def draw_curves(metrics: Mapping[str, Mapping[str, Curve]], *, axis: str = "steps") -> Figure:
    """Draw metrics below each other: against steps, and against time if it is known.

    Args:
        metrics: Curves by metric, then by run.
        axis: Label of the axis of steps.

    Raises:
        ConfigurationError: matplotlib is not installed, or there is no curve.
    """
    if not metrics:
        raise ConfigurationError("there is no curve to draw")
    runs = sorted({run for curves in metrics.values() for run in curves})
    is_timed = any(curve.seconds for curves in metrics.values() for curve in curves.values())
    figure = _new_figure(0.6 + 2.4 * len(metrics))
    subplots = figure.subplots(len(metrics), 1 + is_timed, sharex="col", squeeze=False)
    for (name, curves), row in zip(metrics.items(), subplots, strict=True):
        for run, curve in curves.items():
            style = {"color": _RUN_COLOURS[runs.index(run) % len(_RUN_COLOURS)], "marker": "."}
            row[0].plot(curve.steps, curve.values, label=run, **style)
            if curve.seconds:
                row[1].plot([second / 60 for second in curve.seconds], curve.values, **style)
        row[0].set_ylabel(name)
    for axes in subplots.flat:
        axes.spines[["top", "right"]].set_visible(False)
    subplots[-1, 0].set_xlabel(axis)
    if is_timed:
        subplots[-1, 1].set_xlabel("minutes of training")
    if len(runs) > 1:
        fullest = max(zip(metrics.values(), subplots, strict=True), key=lambda pair: len(pair[0]))
        fullest[1][0].legend(frameon=False, fontsize=_LABEL_POINTS)
    return figure


def plot_timelines(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Draw timelines into a file, as :func:`draw_timelines` does.

    Args:
        timelines: Timelines, simulated or measured, by title.
        path: File to write; its suffix chooses the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        ConfigurationError: matplotlib is not installed, the suffix is not a known format, or a
            timeline is empty.
    """
    _save(draw_timelines(timelines), Path(path))


def draw_timelines(timelines: Mapping[str, Timeline]) -> Figure:
    """Draw timelines below each other on one time axis, their first steady steps aligned.

    Each has one row per rank, and one bar per action, labelled by its unit.

    Args:
        timelines: Timelines, simulated or measured, by title.

    Raises:
        ConfigurationError: matplotlib is not installed, or a timeline is empty.
    """
    if not all(timeline.spans for timeline in timelines.values()):
        raise ConfigurationError("the timeline has no spans; record at least one step")
    heights = [timeline.num_ranks for timeline in timelines.values()]
    figure = _new_figure(0.8 + 0.5 * len(heights) + 0.5 * sum(heights))
    from matplotlib.patches import Patch  # noqa: PLC0415 - optional dependency

    subplots = figure.subplots(
        len(heights), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    spans = (span for timeline in timelines.values() for span in timeline.spans)
    seen = {_key(span) for span in spans if span.end > span.start}  # others have no bar
    keys = sorted(seen, key=lambda key: (list(STYLES).index(key[0]), key[1]))
    windows = aligned(timelines.values())
    for axes, (name, timeline), window in zip(subplots, timelines.items(), windows, strict=True):
        _draw(axes, timeline, keys, window)
        title = (
            f"{timeline.step_time * 1e3:.1f} ms per step, {timeline.bubble_ratio:.0%} of the time "
            "waiting"
        )
        axes.set_title(f"{name}: {title}" if name else title, loc="left", fontsize=10)
    subplots[-1].set_xlabel("milliseconds; 0: the first steady step begins")
    figure.legend(
        handles=[
            Patch(facecolor=_colour(key), label=STYLES[key[0]][0] + ", next batch" * key[1])
            for key in keys
        ],
        loc="outside lower center",
        ncols=min(max(len(keys), 1), 6),
        frameon=False,
        fontsize=_LABEL_POINTS,
    )
    return figure


def as_pixels(figure: Figure) -> NDArray[np.uint8]:
    """The picture as loggers take it: (height, width, 3), red, green and blue up to 255."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - as below

    canvas: Any = FigureCanvasAgg(figure)  # its methods carry no annotations
    canvas.draw()
    return np.array(canvas.buffer_rgba(), dtype=np.uint8)[..., :3]


def as_svg(figure: Figure) -> str:
    """The picture as an element of a page, ``<svg ...>``."""
    file = BytesIO()
    _write(figure, file, "svg")
    text = file.getvalue().decode()
    return text[text.index("<svg") :]  # without the declarations of a file


def _new_figure(height: float) -> Figure:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise ConfigurationError(
            "drawing needs matplotlib: pip install lightning-tspipe[plots]"
        ) from error
    # The object interface: no global state, no display, no change of the user's backend.
    return Figure(figsize=(_WIDTH_INCHES, height), dpi=150, layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in figure.canvas.get_supported_filetypes():
        raise ConfigurationError(f"{path}: unknown image format; write .png, .svg or .pdf")
    _write(figure, path, suffix)


def _write(figure: Figure, file: Path | IO[bytes], kind: str) -> None:
    from matplotlib import rc_context  # noqa: PLC0415 - optional dependency

    # In SVG text stays text, which is smaller and can be searched. One font, since every text
    # repeats the list; SVG viewers replace missing fonts.
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "timeline",
        "font.sans-serif": ["DejaVu Sans"],
    }
    with rc_context(settings if kind == "svg" else {}):
        # Without a date, equal timelines make equal files.
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, metadata=metadata)


def _key(span: Span) -> tuple[Op, bool]:
    return Op(span.op), Action.parse(span.action).batch > 0


def _colour(key: tuple[Op, bool]) -> tuple[str, float]:
    op, is_ahead = key
    return STYLES[op][1], AHEAD_OPACITY if is_ahead else 1.0


def _draw(
    axes: Axes, timeline: Timeline, keys: Sequence[tuple[Op, bool]], window: tuple[float, float]
) -> None:
    """Draw one timeline between two moments."""

    def milliseconds(seconds: float) -> float:
        return (seconds - timeline.steady_start) * 1e3

    for key, rank in product(keys, range(timeline.num_ranks)):
        bars = [
            (milliseconds(span.start), (span.end - span.start) * 1e3)
            for span in timeline.of_rank(rank)
            if _key(span) == key
        ]
        if bars:
            axes.broken_barh(
                bars,
                (rank - _BAR_HEIGHT / 2, _BAR_HEIGHT),
                facecolor=_colour(key),
                edgecolor="white",
                linewidth=0.4,
            )
    first, last = window
    points_per_second = _WIDTH_INCHES * 0.92 * 72 / (last - first)
    for span in timeline.spans:
        middle = milliseconds((span.start + span.end) / 2)
        text = _fitting(span, (span.end - span.start) * points_per_second)
        if text:
            axes.text(
                middle, span.rank, text, ha="center", va="center", fontsize=_LABEL_POINTS,
                color="black" if _key(span)[1] else "white", clip_on=True,
            )  # fmt: skip
    axes.set_xlim(milliseconds(first), milliseconds(last))
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)  # rank 0 on top
    axes.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _fitting(span: Span, points: float) -> str:
    """The longest label that fits: the unit, or the batch and the weights that it has read."""
    unit = Action.parse(span.action).unit
    labels = [f"{span.batch} {span.read}", str(span.batch)] if span.read else [str(unit)]
    fitting = (label for label in labels if points > _CHARACTER_POINTS * len(label))
    return "" if unit is None else next(fitting, "")
