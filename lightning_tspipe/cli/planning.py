"""``tspipe plan``: find the fastest schedule, cuts and micro-batches, and their memory."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_tspipe.cli import modules, relaying
from lightning_tspipe.cli.quantities import (
    format_seconds,
    parse_bandwidth,
    parse_flops,
    parse_memories,
    parse_seconds,
    parse_speeds,
)
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning.cluster import Cluster, Link
from lightning_tspipe.planning.mesh import plan_cluster
from lightning_tspipe.planning.partition import megabytes
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.recomputing import keep_or_recompute
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.planning.table import aligned
from lightning_tspipe.runtime.transport.links import NOMINAL
from lightning_tspipe.runtime.weights.policies import POLICIES
from lightning_tspipe.schedules.registry import ASYNCHRONOUS, SCHEDULES, runs_ahead
from lightning_tspipe.strategy.setup.options import parse_bytes

_FASTER = 1.01
"""A schedule must be faster by this factor than one with less staleness to be recommended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tspipe plan``."""
    parser.add_argument(
        "target",
        help="FILE.py[:FUNCTION] that returns a LightningModule and its training data, or a "
        "profile that --save-profile wrote",
    )
    parser.add_argument("--devices", type=int, required=True, help="all devices")
    parser.add_argument(
        "--nodes", type=int, default=1, help="nodes, each with the same number of devices"
    )
    parser.add_argument(
        "--replicas",
        metavar="auto|4",
        help="data-parallel pipelines, each with a part of the batch: 'auto' finds the "
        "fastest number (default: 1 on one node, auto on several)",
    )
    parser.add_argument("--batch", type=int, help="samples per call, of all replicas together")
    schedules = ["all", *SCHEDULES, ASYNCHRONOUS, "relay"]
    parser.add_argument("--schedule", default="all", choices=schedules)
    parser.add_argument(
        "--weights", default="pipeoptim", choices=POLICIES, help="weight policy of 1f1b"
    )
    parser.add_argument("--memory", metavar="32GiB", help="of one device, for everything")
    parser.add_argument(
        "--state", metavar="8GiB", help="of one device, for weights, gradients, optimizer, teacher"
    )
    parser.add_argument(
        "--memories", metavar="32GiB,16GiB", help="of each device, or of those of one node"
    )
    parser.add_argument(
        "--link",
        metavar="50GB/s",
        help="between two devices (default: measured between two of this machine, where costs are "
        "measured here too; else 4GB/s)",
    )
    parser.add_argument(
        "--latency", metavar="20us", help="of one message (default: measured, else 150us)"
    )
    parser.add_argument(
        "--inter-node-link", metavar="25GB/s", help="between devices of two nodes, if not --link"
    )
    parser.add_argument("--inter-node-latency", metavar="30us", help="if not --latency")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="times as fast as the device that is measured"
    )
    parser.add_argument(
        "--speeds", metavar="1,1,0.5,0.5", help="of each device, or of those of one node"
    )
    parser.add_argument(
        "--flops",
        metavar="60TFLOP/s",
        help="sustained speed of a device that is not here: costs "
        "are calculated from floating-point operations, nothing is measured",
    )
    parser.add_argument("--microbatches", type=int, help="per call, instead of the best number")
    parser.add_argument(
        "--activation-checkpointing",
        nargs="?",
        const="always",
        choices=("always", "auto"),
        help="stages save only their inputs and are recomputed in the backward; auto: if that is "
        "faster within the memory",
    )
    parser.add_argument("--student", nargs="+", help="trained submodules, if not `student`")
    parser.add_argument("--teacher", nargs="+", help="forward-only submodules, if not `teacher`")
    parser.add_argument("--accelerator", default="auto", help="where to measure")
    parser.add_argument("--save", type=Path, metavar="plan.json", help="write the best plan")
    parser.add_argument("--save-profile", type=Path, metavar="profile.json", help="write the costs")


def run(options: argparse.Namespace) -> None:
    """Measure or read, plan, print, save."""
    if options.schedule == "relay":
        relaying.run(options, partial(_link, options))
        return
    _cluster(options, NOMINAL)  # refuse impossible numbers before anything is measured
    profile = _changed(_profile(options), options)
    cluster = _cluster(options, _link(options))
    names: tuple[str, ...] = SCHEDULES if options.schedule == "all" else (options.schedule,)
    if len(names) > 1 and profile.teacher is None:
        names = tuple(name for name in names if name != "gpipe")
    outcomes = []
    for name in names:
        print(f"planning {name} ...", file=sys.stderr)  # noqa: T201
        outcomes.append(_outcome(name, profile, cluster, options))
    best = recommended([outcome for outcome in outcomes if outcome.plan is not None])
    if best is None or best.plan is None:
        reasons = "; ".join(dict.fromkeys(outcome.failure for outcome in outcomes))
        if _num_replicas(options) == 1 and profile.student.num_atoms < options.devices:
            reasons += ". Or divide the devices into several pipelines: --replicas auto"
        raise PartitionError(reasons)
    print(table(outcomes, best, options.speed))  # noqa: T201 - the command's output
    print(f"\n{best.plan}")  # noqa: T201
    if options.speed != 1.0:
        print(f"(times as measured here; the devices are {options.speed:g} times as fast)")  # noqa: T201
    if options.save is not None:
        options.save.write_text(best.plan.to_json(), encoding="utf-8")
        print(f"\nsaved; {_use(options)}")  # noqa: T201


def _changed(profile: StepProfile, options: argparse.Namespace) -> StepProfile:
    """Save the profile if requested, and adapt it to the options."""
    if options.save_profile is not None:
        options.save_profile.write_text(profile.to_json(), encoding="utf-8")
    if options.batch is not None:
        profile = profile.with_batch(options.batch)
    if options.activation_checkpointing == "always":
        profile = profile.recomputing(range(profile.student.num_atoms))
    return profile


def _use(options: argparse.Namespace) -> str:
    """Say how to use a saved plan."""
    strategy = f'TSPipeStrategy(plan="{options.save}")'
    devices = f"devices={options.devices // options.nodes}"
    if options.nodes > 1:
        devices += f", num_nodes={options.nodes}"
    return f"Trainer(strategy={strategy}, {devices}) runs it"


@dataclass(frozen=True)
class Outcome:
    """A schedule, with its best plan or the reason why there is none."""

    schedule: str
    plan: Plan | None
    failure: str = ""

    @property
    def staleness(self) -> int:
        """Number of updates that the teacher is late; with 1f1b, the student's first stage."""
        if self.plan is not None and self.schedule == ASYNCHRONOUS:
            return self.plan.pipeline.num_ranks - 1
        has_teacher = self.plan is not None and self.plan.pipeline.teacher is not None
        return int(runs_ahead(self.schedule) and has_teacher)


def _updates(number: int) -> str:
    return f"{number} update{'s' * (number > 1)}" if number else "none"


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
        ("", "schedule", "replicas", "stages", "micro-batches", "step", "samples/s", "bubble",
         "staleness", "memory"),
    ]  # fmt: skip
    for outcome in outcomes:
        plan = outcome.plan
        if plan is None:
            rows.append(("", outcome.schedule, *["-"] * 8))
            continue
        rows.append((
            "*" if outcome is best else "",
            outcome.schedule,
            str(plan.num_replicas),
            str(plan.pipeline.student.num_stages),
            str(plan.num_microbatches),
            format_seconds(plan.step_seconds / speed),
            f"{plan.samples_per_second * speed:.0f}",
            f"{plan.bubble_ratio:.0%}",
            _updates(outcome.staleness),
            megabytes(max(plan.memory_bytes)),
        ))  # fmt: skip
    if all(one.plan is None or one.plan.num_replicas == 1 for one in outcomes):
        rows = [(*row[:2], *row[3:]) for row in rows]
    failures = [f"{one.schedule}: {one.failure}" for one in outcomes if one.plan is None]
    return "\n".join([*aligned(rows), *failures])


def _profile(options: argparse.Namespace) -> StepProfile:
    flops_per_second = parse_flops(options.flops)
    if options.target.endswith(".json"):
        if flops_per_second is not None:
            raise ConfigurationError("--flops: a saved profile has its costs already")
        path = Path(options.target)
        if not path.is_file():
            raise ConfigurationError(f"there is no file {path}")
        return StepProfile.from_json(path.read_text(encoding="utf-8"))
    module, data = modules.load(options.target)
    doing = "measuring one step on this device" if flops_per_second is None else "tracing one step"
    print(f"{doing} ...", file=sys.stderr)  # noqa: T201
    return modules.measure(
        module,
        data,
        accelerator=options.accelerator,
        student=options.student,
        teacher=options.teacher,
        flops_per_second=flops_per_second,
    )


def _link(options: argparse.Namespace) -> Link:
    """The link between two devices, as given, measured here, or assumed; prints which."""
    said = options.link is not None and options.latency is not None
    is_here = not options.target.endswith(".json") and options.flops is None and not said
    measured = None
    if is_here and options.devices > 1:
        print("measuring the link between two devices ...", file=sys.stderr)  # noqa: T201
        measured = modules.measure_link(options.accelerator)
    found = measured or NOMINAL
    link = Link(
        found.latency if options.latency is None else parse_seconds(options.latency),
        found.bandwidth if options.link is None else parse_bandwidth(options.link),
    )
    if not said:
        how = "assumed" if measured is None else "measured between two of this machine"
        print(f"link between two devices: {link} ({how}; --link, --latency)", file=sys.stderr)  # noqa: T201
    return link


def _cluster(options: argparse.Namespace, link: Link) -> Cluster:
    """The devices, with times relative to the device that is measured.

    Args:
        options: Options of the command.
        link: Link between two devices.

    Raises:
        ConfigurationError: Impossible or contradicting options.
    """
    if options.devices < 1:
        raise ConfigurationError(f"--devices {options.devices}: at least 1")
    if options.speed <= 0:
        raise ConfigurationError(f"--speed {options.speed}: must be greater than 0")

    # On devices that are faster by a factor, messages take longer by it, relative to computing.
    def scaled(latency: float, bandwidth: float) -> Link:
        return Link(latency * options.speed, bandwidth / options.speed)

    between, inter = options.inter_node_latency, options.inter_node_link
    inter_node_link = scaled(
        link.latency if between is None else parse_seconds(between),
        link.bandwidth if inter is None else parse_bandwidth(inter),
    )
    return Cluster(
        options.devices,
        scaled(*link),
        speeds=() if options.speeds is None else parse_speeds(options.speeds),
        memories=() if options.memories is None else parse_memories(options.memories),
        num_nodes=options.nodes,
        inter_node_link=inter_node_link,
    )


def _num_replicas(options: argparse.Namespace) -> int | Literal["auto"]:
    """The number of replicas: by default 1 on one node, the fastest on several.

    Raises:
        ConfigurationError: It is not at least 1.
    """
    wished = options.replicas or ("1" if options.nodes == 1 else "auto")
    if wished == "auto":
        return "auto"
    if not wished.isdecimal() or int(wished) < 1:
        raise ConfigurationError(f"--replicas {wished}: give 'auto', or a number of at least 1")
    return int(wished)


def _outcome(
    name: str, profile: StepProfile, cluster: Cluster, options: argparse.Namespace
) -> Outcome:
    constraints: dict[str, Any] = {
        "schedule": name,
        "weights": options.weights,
        "memory_limit": parse_bytes(options.memory),
        "state_limit": parse_bytes(options.state),
    }
    if options.microbatches is not None:
        constraints["num_microbatches"] = options.microbatches

    def best(profile: StepProfile) -> Plan:
        return plan_cluster(profile, cluster, num_replicas=_num_replicas(options), **constraints)

    try:
        if options.activation_checkpointing == "auto":
            return Outcome(name, keep_or_recompute(profile, best)[1])
        return Outcome(name, best(profile))
    except PartitionError as error:
        return Outcome(name, None, str(error))
