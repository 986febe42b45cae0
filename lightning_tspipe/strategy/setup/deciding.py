"""Measure, plan, and agree on who gets what."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.placement import Placement, default_ranks
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.recomputing import keep_or_recompute
from lightning_tspipe.planning.run_plan import RunPlan, Source
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling import is_paired, profile_step
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.frozen import parameter_names
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.strategy.setup.freezing import Freezing, of_plan, place_frozen
from lightning_tspipe.strategy.setup.machine import link_of, memory_limit, nominal_rate
from lightning_tspipe.strategy.setup.options import SetupOptions, parse_bytes
from lightning_tspipe.strategy.setup.plan_of_run import FROZEN, PlanOfRun, made_for
from lightning_tspipe.strategy.setup.weight_source import InitialWeights

log = logging.getLogger("lightning_tspipe")

_ACTION_SECONDS = 1.0e-4


def agree(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    captured: Captured,
    options: SetupOptions,
    transport: Transport,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer],
    replicas: Replicas,
    initial: InitialWeights,
    freezing: Freezing,
    num_frozen: int,
    run: PlanOfRun,
) -> RunPlan:
    """Agree on the plan, on all ranks.

    Raises:
        PartitionError: The networks can't be cut as asked for.
    """
    num_ranks = transport.num_ranks
    wanted = made_for(options, num_ranks, replicas.number, captured, num_frozen)
    if initial.placement is not None:
        return RunPlan(wanted, "given", initial.placement)
    known = _known(wanted, captured, options, freezing, run)
    if known is not None:
        return known
    decided = None
    if replicas.is_first:
        if transport.rank == num_ranks - 1:
            link = link_of(transport, by_flops=options.plans_by_flops)
            decided = _decide(captured, options, num_ranks, device, optimizers, num_frozen, link)
        decided = transport.broadcast_object(decided, num_ranks - 1)
    # Measured apart, they would not agree, and peers would hold different stages.
    decision: _Decision = replicas.broadcast(decided)
    parameters = parameter_names(captured.networks["student"])
    freezing.learn(decision.profile, decision.plan, replicas.number, parameters)
    if transport.rank == LOSS_RANK and replicas.is_first:
        log.info("%s", decision.summary)
    source = "given" if decision.plan is None else _source(options)
    return RunPlan(wanted, source, decision.placement, decision.plan)


def _known(
    wanted: dict[str, Any],
    captured: Captured,
    options: SetupOptions,
    freezing: Freezing,
    run: PlanOfRun,
) -> RunPlan | None:
    """The plan that was given, or made before: by the run that this one resumes, or on freezing.

    Raises:
        PartitionError: The plan that was given is one for something else.
    """
    num_ranks, num_frozen = wanted["devices per pipeline"], wanted[FROZEN]
    if options.plan is not None and not num_frozen:
        _check_plan(options.plan, captured, num_ranks, wanted["devices"] // num_ranks)
        return RunPlan(wanted, "given", options.plan.placement, options.plan)
    found = run.reuse(wanted) if freezing.plan is None else None
    if found is not None:
        return found
    if num_frozen and (freezing.plan is not None or _needs_no_measuring(options, num_ranks)):
        number = 1 if options.num_microbatches == "auto" else options.num_microbatches
        num_atoms = len(captured.networks["student"].atoms)
        placement, plan = place_frozen(freezing, num_atoms, num_frozen, num_ranks, number)
        return RunPlan(wanted, _source(options) if plan else "given", placement, plan)
    return RunPlan(wanted, "given", _single(captured, options)) if num_ranks == 1 else None


def _source(options: SetupOptions) -> Source:
    return "flops" if options.plans_by_flops else "times"


def _needs_no_measuring(options: SetupOptions, num_ranks: int) -> bool:
    """Whether there is nothing to decide, or the user has decided it."""
    return num_ranks == 1 or options.plan is not None or isinstance(options.partition, Mapping)


@dataclass(frozen=True)
class _Decision:
    """A placement, why it was chosen, and the profile that it was chosen by."""

    placement: Placement
    summary: str
    profile: StepProfile | None = None
    plan: Plan | None = None


def _check_plan(plan: Plan, captured: Captured, num_ranks: int, num_replicas: int) -> None:
    """Refuse a plan that was made for something else.

    Raises:
        PartitionError: Says what differs.
    """
    planned, found = (plan.pipeline.num_ranks, plan.num_replicas), (num_ranks, num_replicas)
    if planned != found:
        raise PartitionError(
            f"the plan is one for {_devices(*planned)}, and this run has {_devices(*found)}: use "
            f"num_stages={planned[0]} and devices={planned[0] * planned[1]}, or plan again with "
            f"--devices {found[0] * found[1]} --replicas {found[1]}"
        )
    cuts = {"student": plan.student_cuts, "teacher": plan.teacher_cuts}
    layouts = {"student": plan.pipeline.student, "teacher": plan.pipeline.teacher}
    for name in ("student", "teacher"):
        network, layout = captured.networks.get(name), layouts[name]
        found = (0, 0)
        if network is not None:
            found = len(network.atoms), len(captured.plan.calls_of(name))
        planned = (cuts[name][-1], layout.num_calls) if layout is not None else (0, 0)
        if planned != found:
            raise PartitionError(
                f"the plan is one for a {name} of {planned[0]} atoms that is called {planned[1]} "
                f"times per step; this one has {found[0]} atoms and {found[1]} calls. Plan again: "
                "the module or its step has changed"
            )


def _devices(num_ranks: int, num_replicas: int) -> str:
    if num_replicas == 1:
        return f"{num_ranks} devices"
    return f"{num_replicas} replicas of {num_ranks} devices"


def _single(captured: Captured, options: SetupOptions) -> Placement:
    number = 1 if options.num_microbatches == "auto" else options.num_microbatches
    networks = captured.networks
    teacher = networks.get("teacher")
    return Placement(
        1,
        (0, len(networks["student"].atoms)),
        (0,),
        (0, len(teacher.atoms)) if teacher is not None else (),
        (0,) if teacher is not None else (),
        number,
    )


def _decide(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    captured: Captured,
    options: SetupOptions,
    num_ranks: int,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer],
    num_frozen: int,
    link: Link,
) -> _Decision:
    """Measure and plan."""
    captured = captured.whole
    plan, networks = captured.plan, captured.networks
    student, teacher = networks["student"], networks.get("teacher")
    paired = teacher is not None and is_paired(student, teacher)
    if plan.has_ema and teacher is not None and not paired:
        raise PartitionError(
            "the step averages parameters of networks that are built differently, so that the "
            "parts of a pair could come to different ranks. Give the teacher the same structure "
            "as the beginning of the student"
        )
    partition = options.partition
    if isinstance(partition, Mapping):
        return _by_hand(partition, captured, options, num_ranks, paired=paired)
    profile = profile_step(
        captured, device, optimizers, options.microbatch_counts,
        nominal_rate(device) if options.plans_by_flops else None, only_counts=True,
    )  # fmt: skip
    profile = profile.recomputing(options.recomputed([atom.name for atom in profile.student.atoms]))

    def best(profile: StepProfile) -> Plan:
        return profile.freezing(num_frozen).plan(
            num_ranks,
            state_limit=_state_limit(options, profile),
            partition="auto" if isinstance(partition, str) else list(partition),
            link=link,
            **planning_constraints(options, device),
        )

    text = ""
    if options.activation_checkpointing == "auto" and _is_limited(options, device):
        profile, decided = keep_or_recompute(profile, best)
        if profile.student.recomputed:
            text = "\nactivation_checkpointing='auto' was switched on: nothing else fits as fast"
    else:
        decided = best(profile)
    told = f"{decided}{text}\nlink between neighbours: {link}"
    return _Decision(of_plan(decided, num_frozen), told, profile, decided)


def _is_limited(options: SetupOptions, device: torch.device) -> bool:
    """Whether memory may keep out a plan."""
    limits = _memory_limit(options, device), options.state_limit
    return any(limit is not None for limit in limits)


def _memory_limit(options: SetupOptions, device: torch.device) -> int | None:
    return memory_limit(
        options.memory_limit, device,
        ranks_per_device=options.ranks_per_device, whatever_is_free=options.plans_by_flops,
    )  # fmt: skip


def planning_constraints(options: SetupOptions, device: torch.device) -> dict[str, Any]:
    """Constraints of the user and the machine on every plan of this run."""
    return {
        "memory_limit": _memory_limit(options, device),
        "schedule": options.schedule,
        "num_microbatches": options.num_microbatches,
        "split": False if options.compile else options.split_backward,
        "action_overhead": _ACTION_SECONDS,
        "weights": options.weights or "pipeoptim",
    }


def _by_hand(
    partition: Mapping[str, Sequence[int]],
    captured: Captured,
    options: SetupOptions,
    num_ranks: int,
    *,
    paired: bool,
) -> _Decision:
    cuts: dict[str, tuple[int, ...]] = {}
    for name, network in captured.networks.items():
        counts = partition.get(name)
        if counts is None or len(counts) < 1 or sum(counts) != len(network.atoms):
            raise PartitionError(
                f"partition[{name!r}]={counts!r} must give the number of atoms of each stage, "
                f"together {len(network.atoms)}"
            )
        cuts[name] = (0, *accumulate(counts))
    teacher = cuts.get("teacher", ())
    if paired and tuple(cuts["student"][: len(teacher) - 1]) != teacher[:-1]:
        raise PartitionError(
            f"the student is cut at {cuts['student']} and the teacher at {teacher}: the parts of "
            "an EMA pair would lie on different ranks. Give one partition=[...] for both"
        )
    number = 1 if options.num_microbatches == "auto" else options.num_microbatches
    ranks = default_ranks(len(cuts["student"]) - 1, num_ranks)
    teacher_ranks = default_ranks(len(teacher) - 1, num_ranks) if teacher else ()
    if paired:
        teacher_ranks = ranks[: len(teacher) - 1]
    placement = Placement(num_ranks, cuts["student"], ranks, teacher, teacher_ranks, number)
    return _Decision(placement, f"partition by hand: {cuts}")


def _state_limit(options: SetupOptions, profile: StepProfile) -> int | None:
    limit = options.state_limit
    if not isinstance(limit, float):
        return parse_bytes(limit)
    return int(limit * profile.state_bytes)
