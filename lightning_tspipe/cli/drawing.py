"""``tspipe simulate`` and ``tspipe timeline``: draw every rank's actions and idle time."""

from __future__ import annotations

import json
import shutil
import webbrowser
from dataclasses import dataclass, field
from pathlib import Path

from lightning_tspipe.cli.modules import read
from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.pages.timeline import timeline_page
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.plots import plot_timelines
from lightning_tspipe.simulation.attribution import Attribution, attribute
from lightning_tspipe.simulation.timeline import Timeline, aligned
from lightning_tspipe.simulation.trace import chrome_trace

_MARGIN = 12
"""Columns of a drawing outside of its time axis."""

_MEASURED, _SIMULATED = "measured", "simulated"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Options of both commands.

    Attributes:
        trace: write a trace for Perfetto or Chrome
        image: write a drawing: .svg, .png or .pdf
        page: write a page to zoom and point at, one file for any browser: .html
        open: write the page and show it in a browser; without --page beside the input
        width: columns of the drawing in the terminal
    """

    trace: Path | None = field(default=None, metadata={"metavar": "trace.json"})
    image: Path | None = field(default=None, metadata={"metavar": "timeline.svg"})
    page: Path | None = field(default=None, metadata={"metavar": "timeline.html"})
    open: bool = False
    width: int | None = None


@dataclass(frozen=True)
class SimulationOptions(Drawing):
    """Options of ``tspipe simulate``.

    Attributes:
        plan: a plan that `tspipe plan --save` wrote
        steps: steps to simulate
    """

    plan: Path
    steps: int = 5


@dataclass(frozen=True)
class TimelineOptions(Drawing):
    """Options of ``tspipe timeline``.

    Attributes:
        recording: the timeline.json of a PipelineTimeline
        plan: draw the plan's timeline below it
    """

    recording: Path
    plan: Path | None = field(default=None, metadata={"metavar": "plan.json"})


def run_simulation(options: SimulationOptions) -> None:
    """Simulate a plan."""
    plan = Plan.from_json(read(options.plan))
    print(f"{plan}\n")  # noqa: T201 - the command's output
    _show({_SIMULATED: plan.simulate(options.steps)}, plan.pipeline, options, options.plan)


def run_timeline(options: TimelineOptions) -> None:
    """Draw a recorded run, and the plan's timeline below it."""
    measured = Timeline.from_json(read(options.recording))
    if not measured.spans:
        raise ConfigurationError("the timeline is empty: no step was recorded")
    if options.plan is None:
        _show({_MEASURED: measured}, measured.pipeline, options, options.recording)
        return
    plan = Plan.from_json(read(options.plan))
    # A recording begins when the pipeline is full; so must the simulation below it.
    simulated = plan.simulate_recording(len(measured.steps))
    pipeline = measured.pipeline or plan.pipeline
    timelines = {_MEASURED: measured, _SIMULATED: simulated}
    _show(timelines, pipeline, options, options.recording)
    ratio = plan.step_seconds / measured.step_time if measured.step_time else 0.0
    print(f"\nsimulated / measured step time: {ratio:.2f}")  # noqa: T201


def _show(
    timelines: dict[str, Timeline], pipeline: Pipeline | None, options: Drawing, source: Path
) -> None:
    """Print the timelines one below the other, on one scale, and write the files."""
    columns = options.width or max(40, shutil.get_terminal_size().columns - _MARGIN)
    causes: dict[str, Attribution] = {}
    blocks = []
    for (name, timeline), part in zip(timelines.items(), aligned(timelines.values()), strict=True):
        seconds, waiting = format_seconds(timeline.step_time), timeline.bubble_ratio
        summary = f"{name}: {seconds} per step, {waiting:.0%} of the time waiting"
        lines = [timeline.draw(columns, part), summary]
        try:
            causes[name] = attribute(timeline, timeline.pipeline or pipeline)
            lines.append(str(causes[name]))
        except ConfigurationError as error:
            lines.append(f"no causes of the idle time: {error}")
        blocks.append("\n".join(lines))
    print("\n\n".join(blocks))  # noqa: T201
    if options.trace is not None:
        trace = chrome_trace(timelines, causes)
        options.trace.write_text(json.dumps(trace), encoding="utf-8")
    if options.image is not None:
        plot_timelines(timelines, options.image)
    if options.open or options.page is not None:
        path = options.page or source.with_suffix(".html")
        page = timeline_page(str(source), timelines, pipeline)
        path.write_text(page, encoding="utf-8")
        print(f"page: {path}")  # noqa: T201
        if options.open and not webbrowser.open(path.resolve().as_uri()):
            print("no browser was found on this machine: open the file in one elsewhere")  # noqa: T201
