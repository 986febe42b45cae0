"""``tspipe simulate`` and ``tspipe timeline``: draw every rank's actions and idle time."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.plots import plot_timelines
from lightning_tspipe.simulation.attribution import Attribution, attribute
from lightning_tspipe.simulation.simulator import STEADY_STEPS
from lightning_tspipe.simulation.timeline import Timeline, aligned
from lightning_tspipe.simulation.trace import chrome_trace

_MARGIN = 12
"""Columns of a drawing outside of its time axis."""

_MEASURED, _SIMULATED = "measured", "simulated"


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tspipe simulate``."""
    parser.add_argument("plan", type=Path, help="a plan that `tspipe plan --save` wrote")
    parser.add_argument("--steps", type=int, default=5, help="steps to simulate")
    _add_outputs(parser)


def add_timeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tspipe timeline``."""
    parser.add_argument("recording", type=Path, help="the timeline.json of a PipelineTimeline")
    parser.add_argument(
        "--plan", type=Path, metavar="plan.json", help="draw the plan's timeline below it"
    )
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="trace.json", help="write a trace for Perfetto or Chrome"
    )
    parser.add_argument(
        "--image", type=Path, metavar="timeline.svg", help="write a drawing: .svg, .png or .pdf"
    )
    parser.add_argument("--width", type=int, help="columns of the drawing in the terminal")


def run_simulation(options: argparse.Namespace) -> None:
    """Simulate a plan."""
    plan = Plan.from_json(_read(options.plan))
    print(f"{plan}\n")  # noqa: T201 - the command's output
    _show({_SIMULATED: plan.simulate(options.steps)}, plan.pipeline, options)


def run_timeline(options: argparse.Namespace) -> None:
    """Draw a recorded run, and the plan's timeline below it."""
    measured = _timeline(_read(options.recording))
    if options.plan is None:
        _show({_MEASURED: measured}, measured.pipeline, options)
        return
    plan = Plan.from_json(_read(options.plan))
    # A recording begins when the pipeline is full; so must the simulation below it.
    num_steps = max(3, len(measured.steps))
    simulated = plan.simulate(STEADY_STEPS + num_steps).between(
        STEADY_STEPS, STEADY_STEPS + num_steps - 1
    )
    pipeline = measured.pipeline or plan.pipeline
    _show({_MEASURED: measured, _SIMULATED: simulated}, pipeline, options)
    ratio = plan.step_seconds / measured.step_time if measured.step_time else 0.0
    print(f"\nsimulated / measured step time: {ratio:.2f}")  # noqa: T201


def _show(
    timelines: dict[str, Timeline], pipeline: Pipeline | None, options: argparse.Namespace
) -> None:
    """Print the timelines one below the other, on one scale, and write the files."""
    columns = options.width or max(40, shutil.get_terminal_size().columns - _MARGIN)
    causes: dict[str, Attribution] = {}
    blocks = []
    for (name, timeline), part in zip(timelines.items(), aligned(timelines.values()), strict=True):
        lines = [timeline.draw(columns, part), _summary(name, timeline)]
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


def _summary(name: str, timeline: Timeline) -> str:
    return (
        f"{name}: {format_seconds(timeline.step_time)} per step, "
        f"{timeline.bubble_ratio:.0%} of the time waiting"
    )


def _read(path: Path) -> str:
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    return path.read_text(encoding="utf-8")


def _timeline(text: str) -> Timeline:
    try:
        timeline = Timeline.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"not a timeline ({type(error).__name__}: {error}); the callback PipelineTimeline "
            "writes timeline.json"
        ) from error
    if not timeline.spans:
        raise ConfigurationError("the timeline is empty: no step was recorded")
    return timeline
