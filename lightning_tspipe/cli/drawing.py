"""``tspipe simulate`` and ``tspipe timeline``: what every rank does when."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.plots import plot_timeline
from lightning_tspipe.simulation.timeline import Timeline

_MARGIN = 12
"""Columns that a drawing needs besides its time axis."""


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``tspipe simulate`` takes."""
    parser.add_argument("plan", type=Path, help="a plan that `tspipe plan --save` wrote")
    parser.add_argument("--steps", type=int, default=5, help="steps to simulate")
    _add_outputs(parser)


def add_timeline_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``tspipe timeline`` takes."""
    parser.add_argument("recording", type=Path, help="the timeline.json of a PipelineTimeline")
    parser.add_argument(
        "--plan", type=Path, metavar="plan.json", help="draw what was planned beside it"
    )
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="trace.json", help="write what Perfetto and Chrome open"
    )
    parser.add_argument("--image", type=Path, metavar="timeline.png", help="write a drawing")
    parser.add_argument("--width", type=int, help="columns of the drawing in the terminal")


def run_simulation(options: argparse.Namespace) -> None:
    """Simulate a plan."""
    plan = Plan.from_json(_read(options.plan))
    print(f"{plan}\n")  # noqa: T201 - the command's output
    _show(plan.simulate(options.steps), "simulated", options)


def run_timeline(options: argparse.Namespace) -> None:
    """Draw a recorded run."""
    measured = _timeline(_read(options.recording))
    _show(measured, "measured", options)
    if options.plan is not None:
        plan = Plan.from_json(_read(options.plan))
        num_steps = max(3, len(measured.steps))
        print()  # noqa: T201
        options.trace = options.image = None  # they are the measured one's
        _show(plan.simulate(num_steps), "simulated", options)
        ratio = plan.step_seconds / measured.step_time if measured.step_time else 0.0
        print(f"\nsimulated / measured step time: {ratio:.2f}")  # noqa: T201


def _show(timeline: Timeline, kind: str, options: argparse.Namespace) -> None:
    columns = options.width or max(40, shutil.get_terminal_size().columns - _MARGIN)
    print(timeline.draw(columns))  # noqa: T201
    print(  # noqa: T201
        f"{kind}: {format_seconds(timeline.step_time)} per step, "
        f"{timeline.bubble_ratio:.0%} of the time waiting"
    )
    if options.trace is not None:
        options.trace.write_text(json.dumps(timeline.to_chrome_trace()), encoding="utf-8")
    if options.image is not None:
        plot_timeline(timeline, options.image)


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
