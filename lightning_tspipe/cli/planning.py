"""``tspipe plan``: find the fastest schedule, cuts and micro-batches, and their memory.

For ``--schedule relay`` it measures blocks, distributes them over devices, and compares the modes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_tspipe.callbacks.blockwise import BlockwiseDistillation, BlockwiseRelay
from lightning_tspipe.cli import comparing, language, modules
from lightning_tspipe.cli.plan_options import Options, check_target
from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.cli.relaying import explained
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.planning import relay
from lightning_tspipe.planning.cluster import Cluster, Link
from lightning_tspipe.planning.mesh import plan_cluster
from lightning_tspipe.planning.overlap import Collectives
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile, keep_or_recompute
from lightning_tspipe.planning.table import aligned, megabytes
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.modes.relay.engine import NETWORKS
from lightning_tspipe.runtime.transport.base import NOMINAL, Alone
from lightning_tspipe.schedules.registry import SCHEDULES, runs_ahead
from lightning_tspipe.schedules.windows import ACROSS_STEPS, WINDOWS
from lightning_tspipe.strategy.setup.block_costs import BlockPlanner
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.training.optimizers import plain_optimizer

Outcome = Plan | str
"""The best plan of a schedule, or the reason why there is none."""

_FASTER = 1.01
"""A schedule must be faster by this factor than one with less staleness to be recommended."""

_BLOCK_STEPS = 10
"""Steps in which each block is measured."""


def run(options: Options) -> None:
    """Measure or read, plan, print, save."""
    check_target(options)
    if options.schedule == "relay":
        blocks = _block_profile(options)
        print(explained(blocks, options.devices, options.memory))  # noqa: T201
        return
    _cluster(options, NOMINAL)  # refuse impossible numbers before anything is measured
    profile = _profile(options)
    cluster = _cluster(options, _link(options))
    _show(profile, cluster, options)


def _show(profile: StepProfile, cluster: Cluster, options: Options) -> None:
    """Plan, print, save.

    Raises:
        PartitionError: Nothing fits.
    """
    outcomes: dict[str, Outcome] = {}
    for name in _schedules(options, profile):
        print(f"planning {name} ...", file=sys.stderr)  # noqa: T201
        outcomes[name] = _outcome(name, profile, cluster, options)
    best = recommended([plan for plan in outcomes.values() if isinstance(plan, Plan)])
    if options.memory is not None or cluster.memories:
        print(_answer(best, cluster, options.memory or math.inf))  # noqa: T201
    if options.student_model is not None:
        print(_alone(profile))  # noqa: T201
    compared = _compared(profile, cluster, best, options)
    if best is None:
        if compared is not None:
            print(compared)  # noqa: T201
        if compared is None or compared.choice is None:
            raise _impossible(outcomes, profile, options)
        return
    print(table(outcomes, best, options.speed))  # noqa: T201 - the command's output
    if compared is not None:
        print(f"\n{compared}")  # noqa: T201
    _tell(best, options)


def _compared(
    profile: StepProfile, cluster: Cluster, best: Plan | None, options: Options
) -> comparing.Comparison | None:
    """Data parallelism beside the best pipeline, if requested."""
    if not options.compare:
        return None
    links = _collectives(options, cluster)
    return comparing.compare(profile, cluster, best, options, links)


def _impossible(
    outcomes: Mapping[str, Outcome], profile: StepProfile, options: Options
) -> PartitionError:
    """The reasons why there is no plan."""
    reasons = "; ".join(dict.fromkeys(map(str, outcomes.values())))
    if options.num_replicas == 1 and profile.student.num_atoms < options.devices:
        reasons += ". Or divide the devices into several pipelines: --replicas auto"
    return PartitionError(reasons)


def _tell(best: Plan, options: Options) -> None:
    """Print a plan, and save it if requested."""
    print(f"\n{best}")  # noqa: T201
    if options.speed != 1.0:
        print(f"(times as measured here; the devices are {options.speed:g} times as fast)")  # noqa: T201
    if options.save is None:
        return
    options.save.write_text(best.to_json(), encoding="utf-8")
    nodes = f", num_nodes={options.nodes}" if options.nodes > 1 else ""
    print(  # noqa: T201
        f'\nsaved; Trainer(strategy=TSPipeStrategy(plan="{options.save}"), '
        f"devices={options.devices // options.nodes}{nodes}) runs it"
    )


def _answer(plan: Plan | None, cluster: Cluster, memory: float) -> str:
    """Whether a plan fits, and the rank with the least memory to spare.

    Args:
        plan: The plan; None: there is none that fits.
        cluster: Its devices.
        memory: Bytes that any of them may hold.
    """
    if plan is None:
        return "fits: no"
    limits = [min(memory, limit) for limit in cluster.ranks(plan.num_replicas).memories]
    rank = min(range(len(limits)), key=lambda rank: limits[rank] - plan.memory_bytes[rank])
    assert plan.memory is not None
    uses = sorted(plan.memory.of_rank(rank), key=itemgetter(1), reverse=True)
    most = ", ".join(f"{megabytes(amount)} {name}" for name, amount in uses[:3])
    return (
        f"fits: yes. Rank {rank} needs most of its memory, {megabytes(plan.memory_bytes[rank])} of "
        f"{megabytes(limits[rank])} ({most})"
    )


def _alone(profile: StepProfile) -> str:
    """What one device would hold of everything, as under data parallelism."""
    whole = profile.plan(1, schedule="sequential").state_bytes[0]
    return (
        f"on one device, as each of data parallelism (DDP): {megabytes(whole)} of parameters, "
        "gradients, optimizer state and teacher, before activations"
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
    if options.student_model is not None:
        assert options.flops is not None
        print("tracing one step ...", file=sys.stderr)  # noqa: T201
        step = language.LanguageStep(
            options.student_model, options.teacher_model, options.length,
            1 if options.batch is None else options.batch, options.precision,
        )  # fmt: skip
        return language.at_narrow_places(language.profile_language_step(step, options.flops))
    assert options.target is not None
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
    measured = None
    if _is_measured_here(options) and not said:
        print("measuring the link between two devices ...", file=sys.stderr)  # noqa: T201
        measured = modules.measure_link(options.accelerator)
    link = _as_said(measured or NOMINAL, options.latency, options.link)
    if not said:
        how = "assumed" if measured is None else "measured between two of this machine"
        print(f"link between two devices: {link} ({how}; --link, --latency)", file=sys.stderr)  # noqa: T201
    return link


def _is_measured_here(options: Options) -> bool:
    """Whether devices of this machine are planned for, and there are several."""
    is_saved = options.target is not None and options.target.endswith(".json")
    return not is_saved and options.flops is None and options.devices > 1


def _collectives(options: Options, cluster: Cluster) -> Collectives | None:
    """Speed of DDP's and FSDP2's communication, measured here; None: that of the cluster's links.

    Processes on CPUs, for one, send by the cores that compute, and hide next to nothing.
    """
    said = options.link is not None or options.latency is not None
    if said or options.nodes > 1 or not _is_measured_here(options):
        return None
    print("measuring sums over two devices ...", file=sys.stderr)  # noqa: T201
    found = modules.measure_collectives(options.accelerator)
    if found is None:
        return None
    hidden = f"{found.overlap:.0%} of it hidden behind computing"
    print(f"gradients: {found.all_reduce}, {hidden} (measured; --link)", file=sys.stderr)  # noqa: T201
    names = ("all_reduce", "all_gather", "reduce_scatter")
    links: Any = {name: _scaled(getattr(found, name), options.speed) for name in names}
    return replace(found, num_devices=cluster.num_devices, **links)


def _scaled(link: Link, speed: float) -> Link:
    """A link of devices that are faster by a factor: messages take longer, beside computing."""
    return Link(link.latency * speed, link.bandwidth / speed)


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
    between_nodes = _as_said(link, options.inter_node_latency, options.inter_node_link)
    return Cluster(
        options.devices,
        _scaled(link, options.speed),
        speeds=options.speeds or (),
        memories=options.memories or (),
        num_nodes=options.nodes,
        inter_node_link=_scaled(between_nodes, options.speed),
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
    assert options.target is not None
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
