"""Timelines to zoom, pan and point at.

:func:`viewer` writes the data; ``timeline.js``, which every page contains, draws them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.pages.page import page, table
from lightning_tspipe.plots import AHEAD_OPACITY, STYLES
from lightning_tspipe.simulation.attribution import Attribution, Cause, Idle, attribute
from lightning_tspipe.simulation.timeline import Span, Timeline, aligned

_MICROSECONDS = 3
"""Decimals of a millisecond."""
_CAUSES = {
    Cause.WAITING: "for an action of another rank",
    Cause.TRANSFER: "for a message in transit, or sends one",
    Cause.LOADER: "for the next batch of the loader",
    Cause.TRAINER: "while hooks, loggers and loops of Lightning run",
    Cause.OPTIMIZER: "for gradients or norms of other ranks",
}
"""What an idle rank waits for, as the end of a sentence."""
_HELP = (
    "Turn the wheel to zoom, drag to move, double-click for everything, point at anything for "
    "what it is. Keys: + and - zoom, arrows move, 0 shows everything."
)
_HELP_IN_PAGE = "Click into the drawing first; elsewhere the wheel scrolls the page. "


def timeline_page(
    title: str, timelines: Mapping[str, Timeline], pipeline: Pipeline | None = None
) -> str:
    """A page of timelines on one axis, with the causes of the idle time.

    Args:
        title: Its title.
        timelines: Timelines by name.
        pipeline: Their pipeline; None: the one that each contains.

    Raises:
        ConfigurationError: A timeline is empty.
    """
    body = [f"<h1>{escape(title)}</h1>", *timeline_parts(timelines, pipeline, wheel="always")]
    return page(title, body)


def timeline_parts(
    timelines: Mapping[str, Timeline], pipeline: Pipeline | None = None, *, wheel: str = "focus"
) -> list[str]:
    """Parts of a page: the drawing, and a table of the idle time of each timeline.

    Args:
        timelines: Timelines by name.
        pipeline: Their pipeline; None: the one that each contains.
        wheel: When the wheel zooms: ``always``, or while the drawing has the ``focus``.

    Raises:
        ConfigurationError: A timeline is empty.
    """
    causes: dict[str, Attribution] = {}
    notes = []
    for name, timeline in timelines.items():
        try:
            causes[name] = attribute(timeline, timeline.pipeline or pipeline)
        except ConfigurationError as error:
            notes.append(f"<p>No causes of the idle time, {escape(name)}: {escape(str(error))}</p>")
    tables = [idle_table(name, found) for name, found in causes.items()]
    return [viewer(timelines, causes, wheel=wheel), *tables, *notes]


def viewer(
    timelines: Mapping[str, Timeline], causes: Mapping[str, Attribution], *, wheel: str
) -> str:
    """The drawing: one row per rank, one bar per action; their first steady steps aligned.

    Args:
        timelines: Timelines by name.
        causes: Causes of the idle time of some of them, by the same names.
        wheel: As for :func:`timeline_parts`.

    Raises:
        ConfigurationError: A timeline is empty.
    """
    if not timelines or not all(timeline.spans for timeline in timelines.values()):
        raise ConfigurationError("the timeline has no spans; record at least one step")
    windows = aligned(timelines.values())
    shown = [_data(name, timeline, causes.get(name)) for (name, timeline) in timelines.items()]
    first, zero = windows[0][0], next(iter(timelines.values())).steady_start
    whole = [(first - zero) * 1e3, (windows[0][1] - zero) * 1e3]
    # No "<" within a script: nothing there can end it.
    data = json.dumps({"timelines": shown, "range": whole}, separators=(",", ":"))
    keys = dict.fromkeys(key for each in timelines.values() for key in _keys(each))
    text = "\n\n".join(f"{name}\n{timeline.draw()}" for name, timeline in timelines.items())
    return "\n".join(
        [
            f'<figure class="viewer" data-wheel="{wheel}" tabindex="0">',
            '<script type="application/json">' + data.replace("<", "\\u003c") + "</script>",
            f"<noscript><pre>{escape(text)}</pre></noscript>",
            _legend(sorted(keys, key=lambda key: (list(STYLES).index(key[0]), key[1]))),
            f"<figcaption>{_HELP_IN_PAGE * (wheel == 'focus')}{_HELP}</figcaption>",
            "</figure>",
        ]
    )


def idle_table(name: str, found: Attribution) -> str:
    """A table: how long each rank was idle, why, and for what it waited longest."""
    rows = [["rank", "busy", *(f"{cause.value}, ms" for cause in Cause), "waits longest for"]]
    for rank in range(len(found.seconds_per_step)):
        longest = ", ".join(
            f"{span.action} of rank {span.rank} ({seconds * 1e3:.1f} ms)"
            for span, seconds in found.awaited(rank)
        )
        idle = (found.seconds(rank, cause) * 1e3 for cause in Cause)
        cells = [f"{each:.1f}" if each >= 0.05 else "-" for each in idle]
        rows.append([f"rank {rank}", f"{1 - found.share(rank):.0%}", *cells, longest or "-"])
    return table(rows, caption=f"{name}: idle time per step")


def _data(name: str, timeline: Timeline, found: Attribution | None) -> dict[str, Any]:
    """A timeline for the script; times in milliseconds from its first steady step."""
    zero = timeline.steady_start

    def interval(each: Span | Idle) -> list[float]:
        start, seconds = each.start - zero, each.end - each.start
        return [round(start * 1e3, _MICROSECONDS), round(seconds * 1e3, _MICROSECONDS)]

    texts = dict.fromkeys(span.action for span in timeline.spans)
    numbers = {text: number for number, text in enumerate(texts)}
    spans = sorted(timeline.spans, key=lambda span: (span.rank, span.start))
    places = {id(span): place for place, span in enumerate(spans)}
    idle = () if found is None else found.idle
    return {
        "name": name,
        "summary": f"{timeline.step_time * 1e3:.1f} ms per step, {timeline.bubble_ratio:.0%} of "
        "the time waiting",
        "busy": [_busy(timeline, rank) for rank in range(timeline.num_ranks)],
        "steady": [[(a - zero) * 1e3, (b - zero) * 1e3] for a, b in timeline.windows],
        "actions": [_described(Action.parse(text)) for text in texts],
        "spans": [
            [span.rank, *interval(span), numbers[span.action], span.step, span.batch, span.read]
            for span in spans
        ],
        "causes": {cause.value: reason for cause, reason in _CAUSES.items()},
        "waits": [
            [each.rank, *interval(each), each.cause.value, places.get(id(each.awaited), -1)]
            for each in idle
        ],
    }


def _busy(timeline: Timeline, rank: int) -> float:
    start, end = timeline.windows[rank]
    return timeline.busy(rank) / (end - start) if end > start else 0.0


def _described(action: Action) -> dict[str, Any]:
    name, colour = STYLES[action.op]
    return {
        "text": str(action),
        "name": name + ", next batch" * (action.batch > 0),
        "place": f"{'rank' if action.op.is_rank_wide else 'stage'} {action.stage}",
        "unit": action.unit,
        "colour": colour,
        "opacity": AHEAD_OPACITY if action.batch > 0 else 1,
    }


def _keys(timeline: Timeline) -> list[tuple[Op, bool]]:
    """What of the legend a timeline needs: ops, and whether they run ahead."""
    actions = (Action.parse(span.action) for span in timeline.spans if span.end > span.start)
    return list(dict.fromkeys((action.op, action.batch > 0) for action in actions))


def _legend(keys: Sequence[tuple[Op, bool]]) -> str:
    chips = [
        f'<span class="chip" style="background:{STYLES[op][1]};opacity:'
        f'{AHEAD_OPACITY if ahead else 1}"></span>{STYLES[op][0]}{", next batch" * ahead}'
        for op, ahead in keys
    ]
    chips += ['<span class="chip wait"></span>waits for a rank']
    chips += ['<span class="chip other"></span>idle for another reason']
    return '<ul class="legend">' + "".join(f"<li>{chip}</li>" for chip in chips) + "</ul>"
