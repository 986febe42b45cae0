"""A page about a run: what was planned, what happened, and how good the result is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.pages.page import page, table
from lightning_tspipe.pages.timeline import timeline_parts
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.table import megabytes
from lightning_tspipe.plots import Curve, as_svg, draw_curves
from lightning_tspipe.simulation.timeline import Timeline

ACCURACY = re.compile(r"knn|probe|top\d|acc")
_LOSS = "loss"
_RANK_MEMORY = re.compile(r"peak_memory/rank(\d+)")
_THROUGHPUT = {
    "samples_per_second": "samples per second",
    "tokens_per_second": "tokens per second",
}
_PEAK = "Measured is the peak of tensors on a GPU; on CPUs that of the process, with all libraries."
_MOST_CURVES = 7
"""In one drawing: as many as there are colours."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known of a run.

    Attributes:
        title: What was trained.
        outcome: ``finished``, or what ended it.
        details: More about an error; "" if there was none.
        facts: When, where and how it ran, by name.
        curves: Logged metrics, by name.
        plan: The plan; None where nothing was planned.
        table: What was pipelined, as lines of text; "" without a pipeline.
        timeline: Some recorded steps; None if there are none.
        absent: Why something is missing, by the heading under which it would be.
    """

    title: str
    outcome: str
    details: str = ""
    facts: Mapping[str, str]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    plan: Plan | None = None
    table: str = ""
    timeline: Timeline | None = None
    absent: Mapping[str, str] = field(default_factory=dict)

    def to_html(self) -> str:
        """The page: one file, which loads nothing."""
        kind = "outcome" + " ended" * (self.outcome != "finished")
        ended = escape(self.facts.get("ended", ""))
        body = [
            f"<h1>{escape(self.title)}</h1>",
            f'<p><span class="{kind}">{escape(self.outcome)}</span> {ended}</p>',
            self._error(),
            self._cards(),
            *self._section("Plan", self._plan()),
            *self._section("Timeline", self._timeline()),
            *self._section("Throughput", self._drawing(self._throughput())),
            *self._section("Memory", self._memory()),
            *self._section("Accuracy", self._drawing(self._named(ACCURACY, "accuracy"))),
            *self._section("Loss", self._drawing(self._named(re.compile(_LOSS), _LOSS))),
            *self._section("How it ran", [table([("", ""), *self.facts.items()])]),
        ]
        return page(f"{self.title}: {self.outcome}", filter(None, body))

    def _section(self, title: str, parts: Iterable[str]) -> list[str]:
        """A heading and what belongs there; without anything, why it is missing."""
        found = [part for part in parts if part]
        if not found:
            found = [f"<p>{escape(self.absent.get(title, 'Nothing was logged.'))}</p>"]
        return [f"<h2>{escape(title)}</h2>", *found]

    def _error(self) -> str:
        if not self.details:
            return ""
        text = escape(self.details)
        return f"<details><summary>What was raised</summary><pre>{text}</pre></details>"

    def _cards(self) -> str:
        """The figures that one looks for first."""
        last = {name: curve.values[-1] for name, curve in self.curves.items() if curve.values}
        cards = [
            (label, f"{last[name]:,.0f}") for name, label in _THROUGHPUT.items() if name in last
        ]
        if self.timeline is not None:
            cards.append(("ms per recorded step", f"{self.timeline.step_time * 1e3:.1f}"))
            cards.append(("of the ranks' time waiting", f"{self.timeline.bubble_ratio:.0%}"))
        if "peak_memory" in last:
            cards.append(("peak memory of a rank", _mebibytes(last["peak_memory"])))
        best = [name for name in last if ACCURACY.search(name) and _LOSS not in name]
        cards += [(name, f"{last[name]:.3f}") for name in best if "top5" not in name][:3]
        items = "".join(
            f"<li><strong>{escape(value)}</strong><span>{escape(label)}</span></li>"
            for label, value in cards
        )
        return f'<ul class="cards">{items}</ul>' if items else ""

    def _plan(self) -> list[str]:
        """The plan as a table, with measured memory beside it; else only the stages."""
        parts = []
        if self.plan is not None:
            title, *_ = str(self.plan).splitlines()
            head, *rows = self.plan.rows()
            measured = [self._peak(rank) for rank in range(len(rows))]
            cells = [[*row, peak] for row, peak in zip(rows, measured, strict=True)]
            parts = [
                f"<p>{escape(title)}</p>",
                table([[*head, "measured peak"], *cells]),
                f"<p>{escape(self.plan.reason)}.</p>",
                f"<p>Below, its timeline follows the measured one. {_PEAK}</p>",
            ]
        if self.table:
            stages = f"<pre>{escape(self.table)}</pre>"
            parts.append(
                f"<details{' open' * (not parts)}><summary>Stages</summary>{stages}</details>"
            )
        return parts

    def _peak(self, rank: int) -> str:
        curve = self.curves.get(f"peak_memory/rank{rank}")
        return _mebibytes(curve.values[-1]) if curve is not None else "-"

    def _timeline(self) -> list[str]:
        """The recorded steps, and below them those of the plan, in one drawing."""
        timelines = {}
        if self.timeline is not None:
            timelines["measured"] = self.timeline
        if self.plan is not None:
            steps = () if self.timeline is None else self.timeline.steps
            timelines["simulated from the plan"] = self.plan.simulate_recording(len(steps))
        if not timelines:
            return []
        missing = ""
        if self.timeline is None:
            missing = f"<p>{escape(self.absent.get('Timeline', 'No steps were recorded.'))}</p>"
        pipeline = None if self.plan is None else self.plan.pipeline
        return [missing, *timeline_parts(timelines, pipeline)]

    def _throughput(self) -> dict[str, Mapping[str, Curve]]:
        return {
            label: {label: self.curves[name]}
            for name, label in _THROUGHPUT.items()
            if name in self.curves
        }

    def _memory(self) -> list[str]:
        ranks = [(int(m[1]), name) for name in self.curves if (m := _RANK_MEMORY.fullmatch(name))]
        curves = {f"rank {rank}": self.curves[name] for rank, name in sorted(ranks)}
        if not curves and "peak_memory" in self.curves:
            curves = {"peak memory": self.curves["peak_memory"]}
        # Many ranks have one table: nobody tells apart as many lines.
        drawn = curves if len(curves) <= _MOST_CURVES else {}
        rows = [("", "peak, measured")]
        rows += [(name, _mebibytes(curve.values[-1])) for name, curve in curves.items()]
        drawing = self._drawing({"peak memory, MiB": drawn})
        return [*drawing, table(rows), f"<p>{_PEAK}</p>"] if curves else []

    def _named(self, pattern: re.Pattern[str], label: str) -> dict[str, Mapping[str, Curve]]:
        """The curves with such names, in one drawing; a loss is no accuracy."""
        names = [name for name in self.curves if pattern.search(name)]
        if label != _LOSS:
            names = [name for name in names if _LOSS not in name]
        return {label: {name: self.curves[name] for name in names[:_MOST_CURVES]}}

    def _drawing(self, metrics: Mapping[str, Mapping[str, Curve]]) -> list[str]:
        metrics = {label: curves for label, curves in metrics.items() if curves}
        if not metrics:
            return []
        try:
            return [f'<figure class="curve">{as_svg(draw_curves(metrics))}</figure>']
        except ConfigurationError as error:  # without matplotlib: the last values
            rows = [("", "last")]
            rows += [(n, f"{c.values[-1]:g}") for each in metrics.values() for n, c in each.items()]
            return [f"<p>No curves: {escape(str(error))}</p>", table(rows)]


def _mebibytes(amount: float) -> str:
    return megabytes(amount * 2**20)
