"""Drawings. They need matplotlib: ``pip install lightning-tspipe[plots]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.simulation.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart. What runs ahead for the next
# batch has its op's colour in a light tint.
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
_BAR_HEIGHT = 0.74
_CHARACTER_POINTS = 5.2  # width of a digit at the labels' size
_LABEL_POINTS = 8
_WIDTH_INCHES = 12.0


def plot_timeline(timeline: Timeline, path: str | Path, *, title: str | None = None) -> None:
    """Draw what each rank did when: one row per rank, one bar per action, labelled by its unit.

    Args:
        timeline: Simulated or measured.
        path: File to write; its suffix chooses the format (``.png``, ``.svg``, ``.pdf``).
        title: Above the drawing; None states the time per step and the bubble ratio.

    Raises:
        ConfigurationError: matplotlib is not installed, or the timeline is empty.
    """
    if not timeline.spans:
        raise ConfigurationError("the timeline has no spans; record at least one step")
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise ConfigurationError(
            "drawing needs matplotlib: pip install lightning-tspipe[plots]"
        ) from error
    # The object interface: no global state, no display, no change of the user's backend.
    height = 1.3 + 0.5 * timeline.num_ranks
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    keys = sorted({_key(span) for span in timeline.spans}, key=lambda key: (_order(key[0]), key[1]))
    for op, is_ahead in keys:
        _draw_op(axes, timeline, op, is_ahead=is_ahead)
    _draw_labels(axes, timeline)
    _draw_frame(axes, timeline, title)
    figure.legend(
        loc="outside lower center", ncols=min(len(keys), 6), frameon=False, fontsize=_LABEL_POINTS
    )
    figure.savefig(path)


def _key(span: Span) -> tuple[Op, bool]:
    return Op(span.op), Action.parse(span.action).batch > 0


def _order(op: Op) -> int:
    return list(_COLOURS).index(op)


def _milliseconds(timeline: Timeline, seconds: float) -> float:
    return (seconds - timeline.start) * 1e3


def _draw_op(axes: Axes, timeline: Timeline, op: Op, *, is_ahead: bool) -> None:
    label = _NAMES[op] + (", next batch" if is_ahead else "")
    for rank in range(timeline.num_ranks):
        bars = [
            (_milliseconds(timeline, span.start), (span.end - span.start) * 1e3)
            for span in timeline.spans
            if span.rank == rank and _key(span) == (op, is_ahead)
        ]
        if bars:
            axes.broken_barh(
                bars,
                (rank - _BAR_HEIGHT / 2, _BAR_HEIGHT),
                facecolor=(_COLOURS[op], 0.45 if is_ahead else 1.0),
                edgecolor="white",
                linewidth=0.4,
                label=label,
            )
            label = "_nolegend_"  # one entry per op, not one per rank


def _draw_labels(axes: Axes, timeline: Timeline) -> None:
    points_per_second = _WIDTH_INCHES * 0.92 * 72 / (timeline.end - timeline.start)
    for span in timeline.spans:
        unit = Action.parse(span.action).unit
        text = "" if unit is None else str(unit)
        if text and (span.end - span.start) * points_per_second > _CHARACTER_POINTS * len(text):
            axes.text(
                _milliseconds(timeline, (span.start + span.end) / 2),
                span.rank,
                text,
                ha="center",
                va="center",
                color="black" if _key(span)[1] else "white",
                fontsize=_LABEL_POINTS,
                clip_on=True,
            )


def _draw_frame(axes: Axes, timeline: Timeline, title: str | None) -> None:
    axes.set_xlim(0, _milliseconds(timeline, timeline.end))
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)  # rank 0 on top
    axes.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)])
    axes.set_xlabel("milliseconds")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if title is None:
        title = (
            f"{timeline.step_time * 1e3:.1f} ms per step, {timeline.bubble_ratio:.0%} of the time "
            f"waiting"
        )
    axes.set_title(title, loc="left", fontsize=10)
