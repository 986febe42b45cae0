"""Heads on a frozen trunk: who trains which, found at the first batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from lightning_tspipe.capture.trace import Networks, Step
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.heads import FanoutTraining, StudentFanout
from lightning_tspipe.heads.training import refuse_trained_trunk
from lightning_tspipe.planning.heads import HeadCost, TrunkCost, spread
from lightning_tspipe.planning.pieces import WHOLE
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.run_plan import RunPlan
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.heads import FeatureCache, Heads
from lightning_tspipe.runtime.stages.randomness import network_draws
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.strategy.setup.head_costs import (
    ends_of_pieces,
    head_costs,
    prologue_seconds,
    stand_ins,
    trunk_cost,
)
from lightning_tspipe.strategy.setup.machine import memory_limit, nominal_rate
from lightning_tspipe.strategy.setup.options import SetupOptions, parse_bytes
from lightning_tspipe.strategy.setup.plan_of_run import PlanOfRun, made_for

log = logging.getLogger("lightning_tspipe")

BLOCK = "student"


def fanout_of(module: nn.Module) -> StudentFanout | None:
    """The heads of a module; None if its student is something else."""
    student = getattr(module, BLOCK, None)
    return student if isinstance(student, StudentFanout) else None


def fanout_networks(module: nn.Module, options: SetupOptions) -> Networks:
    """The trunk goes through the pipeline; heads run where they are.

    Raises:
        ConfigurationError: No trunk, a trunk that is trained, or options that heads don't have.
    """
    name = type(module).__name__
    if not isinstance(module, FanoutTraining):
        raise ConfigurationError(
            f"{name}.student is a StudentFanout: derive {name} from FanoutTraining first, as in "
            "class Tasks(FanoutTraining, LightningModule), which runs its steps for each head"
        )
    trunk = getattr(module, "teacher", None)
    if not isinstance(trunk, nn.Module):
        raise ConfigurationError(f"{name} has heads and no trunk: give it a submodule `teacher`")
    refuse_trained_trunk(trunk)
    _refuse_options(module, options)
    return Networks((), ("teacher",), (BLOCK,))


def _refuse_options(module: Any, options: SetupOptions) -> None:
    refused = {
        f"schedule={options.schedule!r}": (
            options.schedule == "1f1b",
            "heads wait for no other rank as it is. Use schedule='tspipe'",
        ),
        "plan": (
            options.plan is not None,
            "heads are measured when they are placed. Give partition= and num_microbatches=",
        ),
        "activation_checkpointing": (
            options.activation_checkpointing not in {False, "auto"},
            "a trunk has no backward. In a head, use torch.utils.checkpoint in its forward",
        ),
        "automatic_optimization=False": (
            not getattr(module, "automatic_optimization", True),
            "each rank has an optimizer for its own heads. Write head_optimizer(name, parameters)",
        ),
    }
    for name, (is_set, remedy) in refused.items():
        if is_set:
            raise ConfigurationError(f"{name} does not go with heads on a trunk: {remedy}")


def heads_of(
    module: nn.Module,
    networks: Networks,
    device: torch.device,
    replicas: Replicas,
    cache: FeatureCache | None = None,
) -> Heads | None:
    """The heads of a module as stages; None if its student is something else.

    Raises:
        ConfigurationError: Several replicas of the pipeline.
    """
    if not networks.local:
        return None
    if replicas.number > 1:
        raise ConfigurationError(
            f"num_stages with {replicas.number} replicas: heads on a trunk are divided among all "
            "devices. Leave num_stages out"
        )
    return Heads(module, BLOCK, device, cache)


def place_heads(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    here: Rank,
    heads: Heads,
    captured: Captured,
    options: SetupOptions,
    step: Step,
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer] | None,
    reading: float = 0.0,
    run: PlanOfRun | None = None,
) -> RunPlan:
    """Measure trunk and heads on one rank, and agree on who gets what.

    Args:
        here: This rank.
        heads: The heads.
        captured: The step.
        options: The user's.
        step: The step.
        batch: Its batch, on all ranks.
        optimizers: Of the heads; None where nothing is trained.
        reading: Seconds that the data rank takes to read a batch.
        run: Knows the plan of the checkpoint that a training goes on from.

    Raises:
        PartitionError: Nothing fits the memory.
    """
    transport = here.transport
    planner = transport.num_ranks - 1
    wanted = made_for(options, transport.num_ranks, 1, captured, 0)
    wanted["heads"] = list(heads.student.names)
    found = None if run is None else run.reuse(wanted)
    if found is not None and heads.cache is None:
        return found
    decided: Placement | PartitionError | None = None
    if transport.rank == planner:
        try:
            decided = _decide(here, heads, captured, options, step, batch, optimizers, reading)
        except PartitionError as error:
            decided = error
    decided = transport.broadcast_object(decided, planner)
    if isinstance(decided, PartitionError):
        raise decided
    # Measured for the cache only, if there is a plan already.
    return found or RunPlan(wanted, "flops" if options.plans_by_flops else "times", decided)


def _decide(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    here: Rank,
    heads: Heads,
    captured: Captured,
    options: SetupOptions,
    step: Step,
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer] | None,
    reading: float,
) -> Placement:
    num_ranks = here.transport.num_ranks
    costs = [HeadCost(name, 1.0) for name in heads.student.names]
    cache, pieces = heads.cache, WHOLE
    ends: list[int] = []
    if num_ranks > 1 or cache is not None:
        ends = ends_of_pieces(here, captured, options)
        trunk, pieces = trunk_cost(here, captured, options, ends)
        if optimizers is None:
            costs = [HeadCost(cost.name, sum(trunk.seconds) / 10) for cost in costs]
        else:
            rate = nominal_rate(here.device) if options.plans_by_flops else None
            costs = head_costs(here, heads, captured.plan, step, batch, optimizers, rate)
    else:
        atoms = len(captured.networks["teacher"].atoms)
        trunk = TrunkCost((0.0,) * atoms, (0,) * atoms, (0.0,) * atoms, ("",) * atoms)
    number = 1 if options.num_microbatches == "auto" else options.num_microbatches
    limit = _memory_limit(options, here.device, trains=optimizers is not None)
    beside = [0.0] * num_ranks
    if num_ranks > 1 and not options.plans_by_flops:
        beside[-1] = reading + prologue_seconds(here, captured.plan, step, batch)
    cuts = _given_cuts(options, trunk, num_ranks)
    found = spread(trunk, costs, num_ranks, limit, cuts, beside)
    pieces = pieces.within(found.cuts[1], ends)
    if num_ranks > 1:
        log.info(
            "heads on a trunk, %d pieces per batch, and %d of its first %d atoms\n%s",
            number, pieces.number, pieces.num_atoms, found.describe(costs),
        )  # fmt: skip
    if cache is not None:
        features = list(stand_ins(captured.plan, here.device).values())
        cache.consider(sum(trunk.seconds) / len(found.ranks), features)
    depth = options.queue_depth
    if depth == "auto":
        depth = len(found.ranks)
    if depth and num_ranks > 1 and optimizers is not None:
        depth = _depth_of_drawing(depth, captured, is_said=options.queue_depth != "auto")
    return found.placement(depth, number, pieces)


def _depth_of_drawing(depth: int, captured: Captured, *, is_said: bool) -> int:
    """How far a trunk runs ahead: not at all if it draws random numbers.

    What ran ahead runs again in a run that goes on, and would draw other ones.

    Raises:
        ConfigurationError: The user wants it to.
    """
    if not network_draws(captured.networks["teacher"], captured.plan):
        return depth
    if is_said:
        raise ConfigurationError(
            f"queue_depth={depth}: the trunk draws random numbers (dropout, in train mode?), and a "
            "run that is resumed would draw others for the batches that it is ahead. Put it into "
            "eval mode in on_train_start, or set queue_depth=0"
        )
    log.warning(
        "the trunk draws random numbers (dropout, in train mode?): it does not run ahead of the "
        "heads, which takes longer. Put it into eval mode if it is to give the same features always"
    )
    return 0


def _memory_limit(options: SetupOptions, device: torch.device, *, trains: bool) -> float:
    """Bytes that a rank may hold."""
    said = options.memory_limit
    if trains:
        limit = memory_limit(
            said, device,
            ranks_per_device=options.ranks_per_device, whatever_is_free=options.plans_by_flops,
        )  # fmt: skip
    else:
        limit = parse_bytes(said)
    return math.inf if limit is None else limit


def _given_cuts(options: SetupOptions, trunk: TrunkCost, num_ranks: int) -> tuple[int, ...] | None:
    """Where the user cuts the trunk.

    Raises:
        PartitionError: Not all of it, or into more stages than there are ranks.
    """
    counts: Any = options.partition
    if isinstance(counts, Mapping):
        counts = counts.get("teacher", "auto")
    if isinstance(counts, str) or num_ranks == 1:
        return None
    number = len(trunk.seconds)
    if sum(counts) != number or min(counts) < 1 or len(counts) > num_ranks:
        raise PartitionError(
            f"partition={list(counts)}: the numbers of the trunk's atoms on each stage must add up "
            f"to {number}, for at most {num_ranks} stages"
        )
    return (0, *accumulate(counts))
