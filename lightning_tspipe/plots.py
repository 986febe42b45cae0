"""Drawings of timelines and metrics. They need ``pip install lightning-tspipe[plots]``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.simulation.timeline import Span, Timeline, aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers. Actions that run ahead for the next batch have a
# light tint of their op's colour.
_COLOURS = {
    Op.FORWARD: "#0072B2",
    Op.TEACHER: "#E69F00",
    Op.BACKWARD: "#009E73",
    Op.INPUT_BACKWARD: "#56B4E9",
    Op.WEIGHT_BACKWARD: "#7FC8AE",
    Op.LOSS: "#D55E00",
    Op.OPTIMIZER: "#CC79A7",
    Op.EFFECTS: "#999999",
    Op.DATA: "#5A5A5A",
}
_NAMES = {
    Op.FORWARD: "student forward",
    Op.TEACHER: "teacher forward",
    Op.BACKWARD: "backward",
    Op.INPUT_BACKWARD: "backward, inputs",
    Op.WEIGHT_BACKWARD: "backward, weights",
    Op.LOSS: "loss",
    Op.OPTIMIZER: "optimizer",
    Op.EFFECTS: "effects of the step",
    Op.DATA: "data",
}
_RUN_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#5A5A5A")
_BAR_HEIGHT = 0.74
_CHARACTER_POINTS = 5.2  # width of a digit at the labels' size
_LABEL_POINTS = 8
_WIDTH_INCHES = 12.0
_AHEAD_OPACITY = 0.45


@dataclass(frozen=True)
class _Panel:
    """One timeline of a drawing, with the ends and the origin of its axis, in seconds."""

    timeline: Timeline
    title: str
    first: float
    last: float
    zero: float

    def milliseconds(self, seconds: float) -> float:
        return (seconds - self.zero) * 1e3


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


def plot_curves(
    metrics: Mapping[str, Mapping[str, Curve]], path: str | Path, *, axis: str = "steps"
) -> None:
    """Draw metrics below each other: against steps, and against time if it is known.

    Args:
        metrics: Curves by metric, then by run.
        path: File to write; its suffix chooses the format (``.png``, ``.svg``, ``.pdf``).
        axis: Label of the axis of steps.

    Raises:
        ConfigurationError: matplotlib is not installed, the suffix is not a known format, or there
            is no curve.
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
    _save(figure, Path(path))


def plot_timeline(timeline: Timeline, path: str | Path, *, title: str | None = None) -> None:
    """Draw a timeline: one row per rank, one bar per action, labelled by its unit.

    Args:
        timeline: Simulated or measured.
        path: File to write; its suffix chooses the format (``.png``, ``.svg``, ``.pdf``).
        title: Title of the drawing; None: the time per step and the bubble ratio.

    Raises:
        ConfigurationError: matplotlib is not installed, the suffix is not a known format, or the
            timeline is empty.
    """
    start, end = timeline.start, timeline.end
    panel = _Panel(timeline, _title(timeline) if title is None else title, start, end, start)
    _plot([panel], path, "milliseconds")


def plot_timelines(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Draw timelines below each other on one time axis, their first steady steps aligned.

    Args:
        timelines: Timelines by title.
        path: As for :func:`plot_timeline`.

    Raises:
        ConfigurationError: As for :func:`plot_timeline`.
    """
    panels = [
        _Panel(timeline, f"{name}: {_title(timeline)}", first, last, timeline.steady_start)
        for (name, timeline), (first, last) in zip(
            timelines.items(), aligned(timelines.values()), strict=True
        )
    ]
    _plot(panels, path, "milliseconds; 0: the first steady step begins")


def _plot(panels: list[_Panel], path: str | Path, axis: str) -> None:
    if not all(panel.timeline.spans for panel in panels):
        raise ConfigurationError("the timeline has no spans; record at least one step")
    heights = [panel.timeline.num_ranks for panel in panels]
    figure = _new_figure(0.8 + 0.5 * len(heights) + 0.5 * sum(heights))
    subplots = figure.subplots(
        len(panels), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    keys = _keys(span for panel in panels for span in panel.timeline.spans)
    for panel, axes in zip(panels, subplots[:, 0], strict=True):
        _draw_bars(axes, panel, keys)
        _draw_labels(axes, panel)
        _draw_frame(axes, panel)
    subplots[-1, 0].set_xlabel(axis)
    _draw_legend(figure, keys)
    _save(figure, Path(path))


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
        raise ConfigurationError(f"{path}: no format to draw in; write .png, .svg or .pdf")
    with _settings(suffix):
        # Without a date, equal timelines make equal files.
        figure.savefig(path, metadata={"Date": None} if suffix == "svg" else None)


def _settings(suffix: str) -> AbstractContextManager[Any]:
    """Settings for SVG: text stays text, which is smaller and can be searched."""
    if suffix != "svg":
        return nullcontext()
    from matplotlib import rc_context  # noqa: PLC0415 - optional dependency

    # One font, since every text repeats the list; SVG viewers replace missing fonts.
    return rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "timeline",
            "font.sans-serif": ["DejaVu Sans"],
        }
    )


def _title(timeline: Timeline) -> str:
    return (
        f"{timeline.step_time * 1e3:.1f} ms per step, {timeline.bubble_ratio:.0%} of the time "
        "waiting"
    )


def _key(span: Span) -> tuple[Op, bool]:
    return Op(span.op), Action.parse(span.action).batch > 0


def _keys(spans: Iterable[Span]) -> list[tuple[Op, bool]]:
    seen = {_key(span) for span in spans if span.end > span.start}  # others have no bar
    return sorted(seen, key=lambda key: (list(_COLOURS).index(key[0]), key[1]))


def _colour(op: Op, is_ahead: bool) -> tuple[str, float]:
    return _COLOURS[op], _AHEAD_OPACITY if is_ahead else 1.0


def _label(op: Op, is_ahead: bool) -> str:
    return _NAMES[op] + (", next batch" if is_ahead else "")


def _draw_bars(axes: Axes, panel: _Panel, keys: Iterable[tuple[Op, bool]]) -> None:
    for key, rank in product(keys, range(panel.timeline.num_ranks)):
        bars = [
            (panel.milliseconds(span.start), (span.end - span.start) * 1e3)
            for span in panel.timeline.of_rank(rank)
            if _key(span) == key
        ]
        if bars:
            axes.broken_barh(
                bars,
                (rank - _BAR_HEIGHT / 2, _BAR_HEIGHT),
                facecolor=_colour(*key),
                edgecolor="white",
                linewidth=0.4,
            )


def _draw_legend(figure: Figure, keys: Sequence[tuple[Op, bool]]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415 - optional dependency

    figure.legend(
        handles=[Patch(facecolor=_colour(*key), label=_label(*key)) for key in keys],
        loc="outside lower center",
        ncols=min(max(len(keys), 1), 6),
        frameon=False,
        fontsize=_LABEL_POINTS,
    )


def _draw_labels(axes: Axes, panel: _Panel) -> None:
    points_per_second = _WIDTH_INCHES * 0.92 * 72 / (panel.last - panel.first)
    for span in panel.timeline.spans:
        text = _fitting(span, (span.end - span.start) * points_per_second)
        if text:
            axes.text(
                panel.milliseconds((span.start + span.end) / 2),
                span.rank,
                text,
                ha="center",
                va="center",
                color="black" if _key(span)[1] else "white",
                fontsize=_LABEL_POINTS,
                clip_on=True,
            )


def _fitting(span: Span, points: float) -> str:
    """The longest label that fits: the unit, or the batch and the weights that it has read."""
    unit = Action.parse(span.action).unit
    labels = [f"{span.batch} {span.read}", str(span.batch)] if span.read else [str(unit)]
    fitting = (label for label in labels if points > _CHARACTER_POINTS * len(label))
    return "" if unit is None else next(fitting, "")


def _draw_frame(axes: Axes, panel: _Panel) -> None:
    num_ranks = panel.timeline.num_ranks
    axes.set_xlim(panel.milliseconds(panel.first), panel.milliseconds(panel.last))
    axes.set_ylim(num_ranks - 0.5, -0.5)  # rank 0 on top
    axes.set_yticks(range(num_ranks), [f"rank {r}" for r in range(num_ranks)])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(panel.title, loc="left", fontsize=10)
