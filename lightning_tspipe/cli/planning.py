"""``tspipe plan``: find the fastest schedule, cuts and micro-batches, and their memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
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
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile, keep_or_recompute
from lightning_tspipe.planning.table import aligned, megabytes
from lightning_tspipe.runtime.transport.base import NOMINAL
from lightning_tspipe.runtime.weights.policies import POLICIES
from lightning_tspipe.schedules.registry import ASYNCHRONOUS, SCHEDULES, runs_ahead
from lightning_tspipe.strategy.setup.options import parse_bytes

_FASTER = 1.01
"""A schedule must be faster by this factor than one with less staleness to be recommended."""


def _with_unit(metavar: str, parse: Callable[[str], Any]) -> Any:  # noqa: ANN401 - a field
    return field(default=None, metadata={"metavar": metavar, "parse": parse})


@dataclass(frozen=True)
class Options:
    """Options of ``tspipe plan``.

    Attributes:
        target: FILE.py[:FUNCTION] that returns a LightningModule and its training data, or a
            profile that --save-profile wrote
        devices: all devices
        nodes: nodes, each with the same number of devices
        replicas: data-parallel pipelines, each with a part of the batch: 'auto' finds the
            fastest number (default: 1 on one node, auto on several)
        batch: samples per call, of all replicas together
        schedule: the schedule; all: compare them
        weights: weight policy of 1f1b
        memory: of one device, for everything
        state: of one device, for weights, gradients, optimizer, teacher
        memories: of each device, or of those of one node
        link: between two devices (default: measured between two of this machine, where costs are
            measured here too; else 4GB/s)
        latency: of one message (default: measured, else 150us)
        inter_node_link: between devices of two nodes, if not --link
        inter_node_latency: if not --latency
        speed: times as fast as the device that is measured
        speeds: of each device, or of those of one node
        flops: sustained speed of a device that is not here: costs are calculated from
            floating-point operations, nothing is measured
        microbatches: per call, instead of the best number
        activation_checkpointing: stages save only their inputs and are recomputed in the
            backward; auto: if that is faster within the memory
        student: trained submodules, if not `student`
        teacher: forward-only submodules, if not `teacher`
        accelerator: where to measure
        save: write the best plan
        save_profile: write the costs
    """

    target: str
    devices: int = field(metadata={"required": True})
    nodes: int = 1
    replicas: str | None = field(default=None, metadata={"metavar": "auto|4"})
    batch: int | None = None
    schedule: str = field(
        default="all", metadata={"choices": ("all", *SCHEDULES, ASYNCHRONOUS, "relay")}
    )
    weights: str = field(default="pipeoptim", metadata={"choices": POLICIES})
    memory: int | None = _with_unit("32GiB", parse_bytes)
    state: int | None = _with_unit("8GiB", parse_bytes)
    memories: tuple[float, ...] | None = _with_unit("32GiB,16GiB", parse_memories)
    link: float | None = _with_unit("50GB/s", parse_bandwidth)
    latency: float | None = _with_unit("20us", parse_seconds)
    inter_node_link: float | None = _with_unit("25GB/s", parse_bandwidth)
    inter_node_latency: float | None = _with_unit("30us", parse_seconds)
    speed: float = 1.0
    speeds: tuple[float, ...] | None = _with_unit("1,1,0.5,0.5", parse_speeds)
    flops: float | None = _with_unit("60TFLOP/s", parse_flops)
    microbatches: int | None = None
    activation_checkpointing: str | None = field(
        default=None, metadata={"nargs": "?", "const": "always", "choices": ("always", "auto")}
    )
    student: list[str] | None = None
    teacher: list[str] | None = None
    accelerator: str = "auto"
    save: Path | None = field(default=None, metadata={"metavar": "plan.json"})
    save_profile: Path | None = field(default=None, metadata={"metavar": "profile.json"})


def run(options: Options) -> None:
    """Measure or read, plan, print, save."""
    if options.schedule == "relay":
        relaying.run(
            options.target, options.devices, options.memory, options.accelerator,
            partial(_link, options),
        )  # fmt: skip
        return
    _cluster(options, NOMINAL)  # refuse impossible numbers before anything is measured
    profile = _profile(options)
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
        nodes = f", num_nodes={options.nodes}" if options.nodes > 1 else ""
        print(  # noqa: T201
            f'\nsaved; Trainer(strategy=TSPipeStrategy(plan="{options.save}"), '
            f"devices={options.devices // options.nodes}{nodes}) runs it"
        )


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
        plan, late = outcome.plan, outcome.staleness
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
            f"{late} update{'s' * (late > 1)}" if late else "none",
            megabytes(max(plan.memory_bytes)),
        ))  # fmt: skip
    if all(one.plan is None or one.plan.num_replicas == 1 for one in outcomes):
        rows = [(*row[:2], *row[3:]) for row in rows]
    failures = [f"{one.schedule}: {one.failure}" for one in outcomes if one.plan is None]
    return "\n".join([*aligned(rows), *failures])


def _profile(options: Options) -> StepProfile:
    """Measure or read the profile, save it if requested, and adapt it to the options."""
    profile = _measured(options)
    if options.save_profile is not None:
        options.save_profile.write_text(profile.to_json(), encoding="utf-8")
    if options.batch is not None:
        profile = profile.with_batch(options.batch)
    if options.activation_checkpointing == "always":
        profile = profile.recomputing(range(profile.student.num_atoms))
    return profile


def _measured(options: Options) -> StepProfile:
    if options.target.endswith(".json"):
        if options.flops is not None:
            raise ConfigurationError("--flops: a saved profile has its costs already")
        return StepProfile.from_json(modules.read(Path(options.target)))
    module, data = modules.load(options.target)
    doing = "measuring one step on this device" if options.flops is None else "tracing one step"
    print(f"{doing} ...", file=sys.stderr)  # noqa: T201
    return modules.measure(
        module,
        data,
        accelerator=options.accelerator,
        student=options.student,
        teacher=options.teacher,
        flops_per_second=options.flops,
    )


def _link(options: Options) -> Link:
    """The link between two devices, as given, measured here, or assumed; prints which."""
    said = options.link is not None and options.latency is not None
    is_here = not options.target.endswith(".json") and options.flops is None and not said
    measured = None
    if is_here and options.devices > 1:
        print("measuring the link between two devices ...", file=sys.stderr)  # noqa: T201
        measured = modules.measure_link(options.accelerator)
    found = measured or NOMINAL
    link = Link(
        found.latency if options.latency is None else options.latency,
        found.bandwidth if options.link is None else options.link,
    )
    if not said:
        how = "assumed" if measured is None else "measured between two of this machine"
        print(f"link between two devices: {link} ({how}; --link, --latency)", file=sys.stderr)  # noqa: T201
    return link


def _cluster(options: Options, link: Link) -> Cluster:
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

    latency, bandwidth = options.inter_node_latency, options.inter_node_link
    return Cluster(
        options.devices,
        scaled(*link),
        speeds=options.speeds or (),
        memories=options.memories or (),
        num_nodes=options.nodes,
        inter_node_link=scaled(
            link.latency if latency is None else latency,
            link.bandwidth if bandwidth is None else bandwidth,
        ),
    )


def _num_replicas(options: Options) -> int | Literal["auto"]:
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


def _outcome(name: str, profile: StepProfile, cluster: Cluster, options: Options) -> Outcome:
    chosen: dict[str, Any] = {}
    if options.microbatches is not None:
        chosen["num_microbatches"] = options.microbatches
    best: Callable[[StepProfile], Plan] = partial(
        plan_cluster,
        cluster=cluster,
        num_replicas=_num_replicas(options),
        schedule=name,
        weights=options.weights,
        memory_limit=options.memory,
        state_limit=options.state,
        **chosen,
    )
    try:
        if options.activation_checkpointing == "auto":
            return Outcome(name, keep_or_recompute(profile, best)[1])
        return Outcome(name, best(profile))
    except PartitionError as error:
        return Outcome(name, None, str(error))
