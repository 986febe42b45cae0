"""``tspipe plan``: which schedule, cuts and micro-batches are fastest, and what they need."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_tspipe.cli import modules
from lightning_tspipe.cli.quantities import format_seconds, parse_bandwidth, parse_seconds
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.partition import megabytes
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.schedules.registry import SCHEDULES, runs_ahead
from lightning_tspipe.setup import parse_bytes

_FASTER = 1.01
"""A schedule must be so much faster than one with less staleness to be recommended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "target",
        help="FILE.py[:FUNCTION] that returns a LightningModule and its training data, or a "
        "profile that --save-profile wrote",
    )
    parser.add_argument("--devices", type=int, required=True, help="devices of the pipeline")
    parser.add_argument("--schedule", default="all", choices=["all", *SCHEDULES])
    parser.add_argument("--memory", metavar="32GiB", help="of one device, for everything")
    parser.add_argument(
        "--state", metavar="8GiB", help="of one device, for weights, gradients, optimizer, teacher"
    )
    parser.add_argument("--link", default="4GB/s", metavar="50GB/s", help="between two devices")
    parser.add_argument("--latency", default="150us", metavar="20us", help="of one message")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="times as fast as the device that is measured"
    )
    parser.add_argument("--microbatches", type=int, help="per call, instead of the best number")
    parser.add_argument("--student", nargs="+", help="trained submodules, if not `student`")
    parser.add_argument("--teacher", nargs="+", help="forward-only submodules, if not `teacher`")
    parser.add_argument("--accelerator", default="auto", help="where to measure")
    parser.add_argument("--save", type=Path, metavar="plan.json", help="write the best plan")
    parser.add_argument("--save-profile", type=Path, metavar="profile.json", help="write the costs")


def run(options: argparse.Namespace) -> None:
    """Measure or read, plan, print, save."""
    if options.devices < 1:
        raise ConfigurationError(f"--devices {options.devices}: at least 1")
    if options.speed <= 0:
        raise ConfigurationError(f"--speed {options.speed}: more than 0")
    profile = _profile(options)
    if options.save_profile is not None:
        options.save_profile.write_text(profile.to_json(), encoding="utf-8")
    names: tuple[str, ...] = SCHEDULES if options.schedule == "all" else (options.schedule,)
    if len(names) > 1 and profile.teacher is None:
        names = tuple(name for name in names if name != "gpipe")
    outcomes = [_outcome(name, profile, options) for name in names]
    best = recommended([outcome for outcome in outcomes if outcome.plan is not None])
    if best is None or best.plan is None:
        raise PartitionError("; ".join(dict.fromkeys(outcome.failure for outcome in outcomes)))
    print(table(outcomes, best, options.speed))  # noqa: T201 - the command's output
    print(f"\n{best.plan}")  # noqa: T201
    if options.speed != 1.0:
        print(f"(times as measured here; the devices are {options.speed:g} times as fast)")  # noqa: T201
    if options.save is not None:
        options.save.write_text(best.plan.to_json(), encoding="utf-8")
        strategy = f'TSPipeStrategy(plan="{options.save}")'
        print(f"\nsaved; Trainer(strategy={strategy}, devices={options.devices}) runs it")  # noqa: T201


@dataclass(frozen=True)
class Outcome:
    """A schedule, and its best plan or why there is none."""

    schedule: str
    plan: Plan | None
    failure: str = ""

    @property
    def staleness(self) -> int:
        """How many updates the teacher is late."""
        has_teacher = self.plan is not None and self.plan.pipeline.teacher is not None
        return int(runs_ahead(self.schedule) and has_teacher)


def recommended(outcomes: list[Outcome]) -> Outcome | None:
    """The fastest; of equally fast ones, that with the smaller staleness."""
    if not outcomes:
        return None

    def seconds(outcome: Outcome) -> float:
        assert outcome.plan is not None
        return outcome.plan.step_seconds

    fastest = min(map(seconds, outcomes))
    near = [outcome for outcome in outcomes if seconds(outcome) <= fastest * _FASTER]
    return min(near, key=lambda outcome: (outcome.staleness, seconds(outcome)))


def table(outcomes: list[Outcome], best: Outcome | None, speed: float = 1.0) -> str:
    """One row per schedule; the recommended one is marked."""
    rows: list[tuple[str, ...]] = [
        ("", "schedule", "stages", "micro-batches", "step", "samples/s", "bubble", "staleness",
         "memory"),
    ]  # fmt: skip
    for outcome in outcomes:
        plan = outcome.plan
        if plan is None:
            rows.append(("", outcome.schedule, *["-"] * 7))
            continue
        rows.append((
            "*" if outcome is best else "",
            outcome.schedule,
            str(plan.pipeline.student.num_stages),
            str(plan.num_microbatches),
            format_seconds(plan.step_seconds / speed),
            f"{plan.samples_per_second * speed:.0f}",
            f"{plan.bubble_ratio:.0%}",
            f"{outcome.staleness} update" if outcome.staleness else "none",
            megabytes(max(plan.memory_bytes)),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    failures = [f"{one.schedule}: {one.failure}" for one in outcomes if one.plan is None]
    return "\n".join([*lines, *failures])


def _profile(options: argparse.Namespace) -> StepProfile:
    if options.target.endswith(".json"):
        path = Path(options.target)
        if not path.is_file():
            raise ConfigurationError(f"there is no file {path}")
        return StepProfile.from_json(path.read_text(encoding="utf-8"))
    module, data = modules.load(options.target)
    print("measuring one step on this device ...", file=sys.stderr)  # noqa: T201
    return modules.measure(
        module,
        data,
        accelerator=options.accelerator,
        student=options.student,
        teacher=options.teacher,
    )


def _outcome(name: str, profile: StepProfile, options: argparse.Namespace) -> Outcome:
    wishes: dict[str, Any] = {
        "schedule": name,
        "memory_limit": parse_bytes(options.memory),
        "state_limit": parse_bytes(options.state),
        # On devices so many times as fast, messages take so many times as long as they compute.
        "link": (
            parse_seconds(options.latency) * options.speed,
            parse_bandwidth(options.link) / options.speed,
        ),
    }
    if options.microbatches is not None:
        wishes["num_microbatches"] = options.microbatches
    try:
        return Outcome(name, profile.plan(options.devices, **wishes))
    except PartitionError as error:
        return Outcome(name, None, str(error))
