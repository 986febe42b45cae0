"""``tspipe plan``: find the fastest schedule, cuts and micro-batches, and their memory.

For ``--schedule relay`` it measures blocks, distributes them over devices, and compares the modes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_tspipe.callbacks.blockwise import BlockwiseDistillation, BlockwiseRelay
from lightning_tspipe.cli import modules, quantities
from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning import relay
from lightning_tspipe.planning.cluster import Cluster, Link
from lightning_tspipe.planning.mesh import plan_cluster
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile, keep_or_recompute
from lightning_tspipe.planning.table import aligned, megabytes
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.modes.relay.engine import NETWORKS
from lightning_tspipe.runtime.transport.base import NOMINAL, Alone
from lightning_tspipe.runtime.weights.policies import POLICIES
from lightning_tspipe.schedules.registry import SCHEDULES, runs_ahead
from lightning_tspipe.schedules.windows import ACROSS_STEPS, WINDOWS
from lightning_tspipe.strategy.setup.block_costs import BlockPlanner
from lightning_tspipe.strategy.setup.options import SetupOptions, parse_bytes
from lightning_tspipe.strategy.training.optimizers import plain_optimizer

Outcome = Plan | str
"""The best plan of a schedule, or the reason why there is none."""

_FASTER = 1.01
"""A schedule must be faster by this factor than one with less staleness to be recommended."""

_BLOCK_STEPS = 10
"""Steps in which each block is measured."""


def _parsed(metavar: str, parse: Callable[[str], Any]) -> Any:  # noqa: ANN401 - a field
    return field(default=None, metadata={"metavar": metavar, "parse": parse})


def _parse_replicas(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"--replicas {text}: give 'auto', or a number of at least 1")
    return int(text)


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
        window: batches of an accumulation window; compares the schedules of windows, too
        memory: of one device, for everything
        state: of one device, for weights, gradients, optimizer, teacher
        zero_stage: 1: replicas hold the optimizer state once together, not each of them
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
    replicas: int | Literal["auto"] | None = _parsed("auto|4", _parse_replicas)
    batch: int | None = None
    schedule: str = field(
        default="all", metadata={"choices": ("all", *SCHEDULES, *WINDOWS, "relay")}
    )
    weights: str = field(default="pipeoptim", metadata={"choices": POLICIES})
    window: int | None = None
    memory: int | None = _parsed("32GiB", parse_bytes)
    state: int | None = _parsed("8GiB", parse_bytes)
    zero_stage: int = field(default=0, metadata={"choices": (0, 1)})
    memories: tuple[float, ...] | None = _parsed("32GiB,16GiB", quantities.parse_memories)
    link: float | None = _parsed("50GB/s", quantities.parse_bandwidth)
    latency: float | None = _parsed("20us", quantities.parse_seconds)
    inter_node_link: float | None = _parsed("25GB/s", quantities.parse_bandwidth)
    inter_node_latency: float | None = _parsed("30us", quantities.parse_seconds)
    speed: float = 1.0
    speeds: tuple[float, ...] | None = _parsed("1,1,0.5,0.5", quantities.parse_speeds)
    flops: float | None = _parsed("60TFLOP/s", quantities.parse_flops)
    microbatches: int | None = None
    activation_checkpointing: str | None = field(
        default=None, metadata={"nargs": "?", "const": "always", "choices": ("always", "auto")}
    )
    student: list[str] | None = None
    teacher: list[str] | None = None
    accelerator: str = "auto"
    save: Path | None = field(default=None, metadata={"metavar": "plan.json"})
    save_profile: Path | None = field(default=None, metadata={"metavar": "profile.json"})

    @property
    def num_replicas(self) -> int | Literal["auto"]:
        """As given; by default 1 on one node, the fastest number on several."""
        return self.replicas or (1 if self.nodes == 1 else "auto")


def run(options: Options) -> None:
    """Measure or read, plan, print, save."""
    if options.schedule == "relay":
        blocks = _block_profile(options)
        print(explained(blocks, options.devices, options.memory))  # noqa: T201
        return
    _cluster(options, NOMINAL)  # refuse impossible numbers before anything is measured
    profile = _profile(options)
    cluster = _cluster(options, _link(options))
    outcomes: dict[str, Outcome] = {}
    for name in _schedules(options, profile):
        print(f"planning {name} ...", file=sys.stderr)  # noqa: T201
        outcomes[name] = _outcome(name, profile, cluster, options)
    best = recommended([plan for plan in outcomes.values() if isinstance(plan, Plan)])
    if best is None:
        reasons = "; ".join(dict.fromkeys(map(str, outcomes.values())))
        if options.num_replicas == 1 and profile.student.num_atoms < options.devices:
            reasons += ". Or divide the devices into several pipelines: --replicas auto"
        raise PartitionError(reasons)
    print(table(outcomes, best, options.speed))  # noqa: T201 - the command's output
    print(f"\n{best}")  # noqa: T201
    if options.speed != 1.0:
        print(f"(times as measured here; the devices are {options.speed:g} times as fast)")  # noqa: T201
    if options.save is not None:
        options.save.write_text(best.to_json(), encoding="utf-8")
        nodes = f", num_nodes={options.nodes}" if options.nodes > 1 else ""
        print(  # noqa: T201
            f'\nsaved; Trainer(strategy=TSPipeStrategy(plan="{options.save}"), '
            f"devices={options.devices // options.nodes}{nodes}) runs it"
        )


def _schedules(options: Options, profile: StepProfile) -> Sequence[str]:
    """Those to compare."""
    if options.schedule != "all":
        return (options.schedule,)
    left_out = "gpipe" if profile.teacher is None else ""
    known = SCHEDULES if options.window is None else (*SCHEDULES, *WINDOWS)
    return [name for name in known if name != left_out]


def staleness(plan: Plan) -> int:
    """Number of updates that the teacher is late; with 1f1b, the student's first stage."""
    if plan.schedule in WINDOWS:
        return 0 if plan.window else plan.pipeline.num_ranks - 1
    return int(runs_ahead(plan.schedule) and plan.pipeline.teacher is not None)


def recommended(plans: Sequence[Plan]) -> Plan | None:
    """The fastest; of equally fast ones, that with the smaller staleness."""
    fastest = min((plan.step_seconds for plan in plans), default=0.0)
    near = [plan for plan in plans if plan.step_seconds <= fastest * _FASTER]
    return min(near, key=lambda plan: (staleness(plan), plan.step_seconds), default=None)


def table(outcomes: Mapping[str, Outcome], best: Plan | None, speed: float = 1.0) -> str:
    """One row per schedule; the recommended one is marked."""
    rows: list[tuple[str, ...]] = [
        ("", "schedule", "replicas", "stages", "micro-batches", "step", "samples/s", "bubble",
         "staleness", "memory"),
    ]  # fmt: skip
    failures = []
    for name, plan in outcomes.items():
        if isinstance(plan, str):
            rows.append(("", name, *["-"] * 8))
            failures.append(f"{name}: {plan}")
            continue
        late = staleness(plan)
        rows.append((
            "*" if plan is best else "",
            name,
            str(plan.num_replicas),
            str(plan.pipeline.student.num_stages),
            str(plan.num_microbatches),
            format_seconds(plan.step_seconds / speed),
            f"{plan.samples_per_second * speed:.0f}",
            f"{plan.bubble_ratio:.0%}",
            f"{late} update{'s' * (late > 1)}" if late else "none",
            megabytes(max(plan.memory_bytes)),
        ))  # fmt: skip
    if all(isinstance(plan, str) or plan.num_replicas == 1 for plan in outcomes.values()):
        rows = [(*row[:2], *row[3:]) for row in rows]
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
            raise ConfigurationError("remove --flops: a saved profile already has costs")
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
    link = _as_said(measured or NOMINAL, options.latency, options.link)
    if not said:
        how = "assumed" if measured is None else "measured between two of this machine"
        print(f"link between two devices: {link} ({how}; --link, --latency)", file=sys.stderr)  # noqa: T201
    return link


def _as_said(link: Link, latency: float | None, bandwidth: float | None) -> Link:
    """A link with what the user says of it."""
    found = link if latency is None else link._replace(latency=latency)
    return found if bandwidth is None else found._replace(bandwidth=bandwidth)


def _cluster(options: Options, link: Link) -> Cluster:
    """The devices, with times relative to the device that is measured.

    Args:
        options: Options of the command.
        link: Link between two devices.

    Raises:
        ConfigurationError: Impossible or contradicting options.
    """
    if options.devices < 1:
        raise ConfigurationError(f"--devices {options.devices}: must be at least 1")
    if options.window is not None and options.window < 1:
        raise ConfigurationError(f"--window {options.window}: must be at least 1")
    if options.schedule in ACROSS_STEPS and options.window is None:
        raise ConfigurationError(
            f"--schedule {options.schedule} has the batches of an accumulation window in the "
            "pipeline: say how many, as in --window 16"
        )
    if options.speed <= 0:
        raise ConfigurationError(f"--speed {options.speed}: must be greater than 0")

    # On devices that are faster by a factor, messages take longer by it, relative to computing.
    def scaled(latency: float, bandwidth: float) -> Link:
        return Link(latency * options.speed, bandwidth / options.speed)

    between_nodes = _as_said(link, options.inter_node_latency, options.inter_node_link)
    return Cluster(
        options.devices,
        scaled(*link),
        speeds=options.speeds or (),
        memories=options.memories or (),
        num_nodes=options.nodes,
        inter_node_link=scaled(*between_nodes),
    )


def _outcome(name: str, profile: StepProfile, cluster: Cluster, options: Options) -> Outcome:
    if options.window is not None and name not in WINDOWS:
        # There, too, an update comes once for so many batches; a window plans that itself.
        seconds = profile.update_seconds_per_byte / options.window
        profile = replace(profile, update_seconds_per_byte=seconds)
    best: Callable[[StepProfile], Plan] = partial(
        plan_cluster,
        cluster=cluster,
        num_replicas=options.num_replicas,
        schedule=name,
        weights=options.weights if options.window is None else "synchronous",
        window=options.window or 0 if name in WINDOWS else 0,
        zero_stage=options.zero_stage,
        memory_limit=options.memory,
        state_limit=options.state,
        num_microbatches="auto" if options.microbatches is None else options.microbatches,
    )
    try:
        if options.activation_checkpointing == "auto":
            return keep_or_recompute(profile, best)[1]
        return best(profile)
    except PartitionError as error:
        return str(error)


def _block_profile(options: Options) -> relay.RelayProfile:
    """Measure each block of a module that relays them.

    Raises:
        ConfigurationError: The module has no blocks.
    """
    module, data = modules.load(options.target)
    if not isinstance(module, BlockwiseDistillation):
        raise ConfigurationError(
            f"--schedule relay needs a module of blocks: class {type(module).__name__}("
            "BlockwiseDistillation, LightningModule)"
        )
    link = _link(options)

    def measured(trainer: Trainer, batch: Tensor) -> relay.RelayProfile:
        device = module.block_input(batch).device
        context = trainer.strategy.precision_plugin.forward_context
        here = Rank(module, NETWORKS, Alone(), device, context=context)
        callback, setup = BlockwiseRelay(profile_steps=_BLOCK_STEPS), SetupOptions(costs="measured")
        optimizers = list(map(plain_optimizer, trainer.optimizers))
        planner = BlockPlanner(here, callback, setup, batch, optimizers)
        found = planner.profile(range(1, options.devices + 1))
        return replace(found, latency=link.latency, bandwidth=link.bandwidth)

    return modules.after_one_step(module, data, measured, accelerator=options.accelerator)


def explained(profile: relay.RelayProfile, num_devices: int, memory: int | None) -> str:
    """Compare all modes, and describe the distribution of the best mode that relays.

    Raises:
        PartitionError: The blocks fit in no mode.
    """
    rows = [("", "mode", "step", "samples/s", "devices of each stage")]
    plans, failures = {}, {}
    for mode in relay.MODES:
        try:
            plans[mode] = relay.plan_mode(mode, profile, num_devices, memory)
        except PartitionError as error:
            failures[mode] = str(error)
    relayed: list[relay.Mode] = [mode for mode in plans if mode in {"dpu", "ahd", "ir"}]
    if not relayed:
        raise PartitionError("; ".join(dict.fromkeys(failures.values())))
    seconds = {mode: relay.seconds_per_batch(mode, plan, profile) for mode, plan in plans.items()}
    best: relay.Mode = min((seconds[mode], mode) for mode in relayed)[1]
    for mode, plan in plans.items():
        each = " ".join(map(str, plan.widths))
        rate = profile.batch_size / seconds[mode]
        mark = "*" if mode == best else ""
        rows.append((mark, mode, format_seconds(seconds[mode]), f"{rate:.1f}", each))
    lines = [*aligned(rows), *(f"{mode}: {failure}" for mode, failure in failures.items())]
    blocks: list[tuple[str, ...]] = [("block", "teacher", "student", "gradients")]
    for block in profile.blocks:
        both = (block.teacher, block.student)
        times = (format_seconds(each[profile.batch_size]) for each in both)
        blocks.append((block.name, *times, f"{block.gradient_bytes / 1e6:.2f} MB"))
    return "\n".join(
        [*lines, "", *aligned(blocks), "", str(plans[best]), _reason(best, plans[best], profile)]
    )


def _reason(mode: relay.Mode, plan: relay.RelayPlan, profile: relay.RelayProfile) -> str:
    """The reason for the time of a step."""
    longest = max(range(plan.num_stages), key=lambda stage: plan.stage_seconds[stage])
    work = sum(block.seconds(profile.batch_size) + block.update for block in profile.blocks)
    return (
        f"mode={mode!r} is the fastest that relays. Its step takes as long as its slowest stage, "
        f"{longest}; the work of all blocks on whole batches, divided evenly, would take "
        f"{format_seconds(work / plan.num_devices)}."
    )
