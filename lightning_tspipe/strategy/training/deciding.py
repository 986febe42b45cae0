"""The plan of a run: known, or made of costs that are measured as far as plans depend on them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.planning.heads import Task, trunk_chain
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.plan import Plan, RunPlan
from lightning_tspipe.planning.step_profile import StepProfile, keep_or_recompute
from lightning_tspipe.profiling.costs import Costs
from lightning_tspipe.profiling.steps import costs_of, profile_forwards, profile_step
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.frozen import parameter_names
from lightning_tspipe.runtime.stages.network import is_paired
from lightning_tspipe.runtime.weights.ownership import beside_stages
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.freezing import of_plan, place_frozen
from lightning_tspipe.strategy.setup.options import SetupOptions, parse_bytes
from lightning_tspipe.strategy.setup.resumption import decided_once, made_for
from lightning_tspipe.strategy.training.optimizers import plain_optimizer
from lightning_tspipe.strategy.training.windows import runs_of, teacher_ahead, window_of

log = logging.getLogger("lightning_tspipe")

_FIRST_COUNTS = 2
"""Numbers of micro-batches that are measured before the first plan: the largest, so that units are
small and don't take long, and enough to see what is the same for any size."""

_Decision = tuple[Placement, str, StepProfile | None, Plan | None]
"""A placement, why it was chosen, the profile that it was chosen by, and the plan of a search."""


@dataclass(frozen=True)
class Decider:
    """Agrees with the other ranks on the plan of a training.

    Attributes:
        run: The run.
        options: The user's, as far as the step allows them.
        here: This rank.
        captured: The step.
        num_frozen: Atoms of the student that are frozen.
    """

    run: Run
    options: SetupOptions
    here: Rank
    captured: Captured
    num_frozen: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.here.transport.num_ranks

    def agree(self) -> RunPlan:
        """The plan, the same on all ranks.

        Raises:
            PartitionError: The networks can't be cut as asked for.
        """
        run = self.run
        wanted = made_for(self.options, self.here, self.captured, self.num_frozen)
        if run.spread is not None:
            return RunPlan(wanted, "given", run.spread.placement)
        known = self._known(wanted)
        if known is not None:
            return known
        placed, summary, profile, plan = decided_once(self.here, self._decide)
        if self.here.transport.rank == LOSS_RANK and self.here.replicas.is_first:
            log.info("%s", summary)
        if profile is None or plan is None:
            return RunPlan(wanted, "given", placed)
        run.freezing.learn(profile, plan, self.here.replicas.number)
        run.freezing.parameters = parameter_names(self.captured.networks["student"])
        return RunPlan(wanted, self.options.source, placed, plan)

    def _known(self, wanted: dict[str, Any]) -> RunPlan | None:
        """The plan that was given, or made before: by the run that goes on here, or on freezing.

        Raises:
            PartitionError: The plan that was given is one for something else.
        """
        options, freezing = self.options, self.run.freezing
        number = options.given_microbatches
        if options.plan is not None and not self.num_frozen:
            self._check_plan(options.plan)
            return RunPlan(wanted, "given", options.plan.placement, options.plan)
        found = self.run.resumption.reuse(wanted) if freezing.plan is None else None
        if found is not None:
            return found
        is_decided = options.plan is not None or isinstance(options.partition, Mapping)
        atoms = {name: len(network.atoms) for name, network in self.captured.networks.items()}
        if self.num_frozen and (freezing.plan is not None or is_decided or self.num_ranks == 1):
            placement, plan = place_frozen(
                freezing, atoms["student"], self.num_frozen, self.num_ranks, number
            )
            return RunPlan(wanted, options.source if plan else "given", placement, plan)
        if self.num_ranks > 1:
            return None
        teacher = (0, atoms["teacher"]) if "teacher" in atoms else ()
        return RunPlan(wanted, "given", Placement.of(1, (0, atoms["student"]), teacher, number))

    def _check_plan(self, plan: Plan) -> None:
        """Refuse a plan that was made for something else.

        Raises:
            PartitionError: Says what differs.
        """
        planned = (plan.pipeline.num_ranks, plan.num_replicas)
        found = (self.num_ranks, self.here.replicas.number)
        if planned != found:
            raise PartitionError(
                f"the plan was made for {_devices(*planned)}, but this run has {_devices(*found)}: "
                f"use num_stages={planned[0]} and devices={planned[0] * planned[1]}, or plan again "
                f"with --devices {found[0] * found[1]} --replicas {found[1]}"
            )
        cuts = {"student": plan.student_cuts, "teacher": plan.teacher_cuts}
        layouts = {"student": plan.pipeline.student, "teacher": plan.pipeline.teacher}
        for name in ("student", "teacher"):
            network, layout = self.captured.networks.get(name), layouts[name]
            found = (0, 0)
            if network is not None:
                found = len(network.atoms), len(self.captured.plan.calls_of(name))
            planned = (cuts[name][-1], layout.num_calls) if layout is not None else (0, 0)
            if planned != found:
                raise PartitionError(
                    f"the plan was made for a {name} of {planned[0]} atoms that is called "
                    f"{planned[1]} times per step; this one has {found[0]} atoms and {found[1]} "
                    "calls. Plan again: the module or its step has changed"
                )

    def _decide(self) -> _Decision:
        """Measure and plan."""
        options, device, captured = self.options, self.here.device, self.captured.whole
        partition = options.partition
        student, teacher = captured.networks["student"], captured.networks.get("teacher")
        paired = teacher is not None and is_paired(student, teacher)
        if captured.plan.has_ema and teacher is not None and not paired:
            raise PartitionError(
                "the step averages parameters of networks that are built differently, so a pair "
                "could be on different ranks. Give the teacher the same structure "
                "as the beginning of the student"
            )
        if isinstance(partition, Mapping):
            return self._by_hand(partition, captured, paired=paired)
        rate = options.rate(device)
        profiled = partial(self._profiled, captured, costs_of(captured, device, rate))
        constraints = options.constraints(device, self.here.transport)
        constraints["window"] = window_of(self.run)
        constraints["teacher_runs"] = runs_of(teacher_ahead(self.run, captured.plan))
        limit = options.state_limit

        def best(profile: StepProfile) -> Plan:
            share = (
                int(limit * profile.state_bytes) if isinstance(limit, float) else parse_bytes(limit)
            )
            return profile.freezing(self.num_frozen).plan(
                self.num_ranks,
                state_limit=share,
                partition="auto" if isinstance(partition, str) else list(partition),
                **constraints,
            )

        is_limited = constraints["memory_limit"] is not None or limit is not None
        may_recompute = options.activation_checkpointing == "auto" and is_limited

        def planned(profile: StepProfile) -> tuple[StepProfile, Plan]:
            with self.run.timed("plan"):
                if may_recompute:
                    return keep_or_recompute(profile, best)
                return profile, best(profile)

        counts = options.microbatch_counts
        first = counts if rate is not None else counts[-_FIRST_COUNTS:]
        profile, decided = measured_until_planned(counts, first, profiled, planned)
        text = ""
        if may_recompute and profile.student.recomputed:
            text = "\nactivation_checkpointing='auto' was switched on: no other fit is as fast"
        told = f"{decided}{text}\nlink between neighbours: {constraints['link']}"
        return of_plan(decided, self.num_frozen), told, profile, decided

    def _profiled(self, captured: Captured, costs: Costs, counts: Sequence[int]) -> StepProfile:
        """The costs of the step, for some numbers of micro-batches."""
        options, device = self.options, self.here.device
        optimizers = list(map(plain_optimizer, self.run.optimizers))
        ties = options.policy is None or options.policy.is_synchronous
        beside = beside_stages(self.here.module, captured)
        with self.run.timed("measure"):
            profile = profile_step(
                captured, device, optimizers, counts, options.rate(device), ties=ties,
                beside=beside, costs=costs,
            )  # fmt: skip
        if options.zero_stage:
            profile = profile.dividing_state(self.here.replicas.number)
        names = [atom.name for atom in profile.student.atoms]
        return profile.recomputing(options.recomputed(names))

    def _by_hand(
        self, partition: Mapping[str, Sequence[int]], captured: Captured, *, paired: bool
    ) -> _Decision:
        cuts: dict[str, tuple[int, ...]] = {}
        for name, network in captured.networks.items():
            counts = partition.get(name)
            if counts is None or len(counts) < 1 or sum(counts) != len(network.atoms):
                raise PartitionError(
                    f"partition[{name!r}]={counts!r} must give the number of atoms of each stage, "
                    f"{len(network.atoms)} in all"
                )
            cuts[name] = (0, *accumulate(counts))
        teacher = cuts.get("teacher", ())
        if paired and tuple(cuts["student"][: len(teacher) - 1]) != teacher[:-1]:
            raise PartitionError(
                f"the student is cut at {cuts['student']} and the teacher at {teacher}: the parts "
                "of an EMA pair would lie on different ranks. Give one partition=[...] for both"
            )
        number = self.options.given_microbatches
        placement = Placement.of(
            self.num_ranks, cuts["student"], teacher, number, self.options.schedule
        )
        return placement, f"partition by hand: {cuts}", None, None


def measured_until_planned(
    counts: Sequence[int],
    first: Sequence[int],
    profiled: Callable[[Sequence[int]], StepProfile],
    planned: Callable[[StepProfile], tuple[StepProfile, Plan]],
) -> tuple[StepProfile, Plan]:
    """Measure the sizes that the plan depends on, the cheapest ones first.

    A plan stands when its own size of micro-batches has been measured, and the next larger one, to
    which it was preferred. Others are extrapolated: they are further away from it.

    Args:
        counts: Numbers of micro-batches that may be measured: powers of two, or one number.
        first: Those that are measured before the first plan.
        profiled: Measures for some of them; what was measured before, it knows.
        planned: Makes a plan, and says which profile it is for.
    """
    tried = set(first)
    while True:
        try:
            found = profiled(sorted(tried))
        except PartitionError:  # so few samples it can't run
            if tried.issuperset(counts):
                raise
            tried |= set(counts)
            continue
        profile, plan = planned(found)
        number = plan.placement.num_microbatches
        more = {count for count in counts if count in {number, number // 2}} - tried
        if not more:
            return profile, plan
        tried |= more


def _devices(num_ranks: int, num_replicas: int) -> str:
    if num_replicas == 1:
        return f"{num_ranks} devices"
    return f"{num_replicas} replicas of {num_ranks} devices"


def place_forwards(here: Rank, captured: Captured, options: SetupOptions) -> Placement:
    """The cuts of networks whose forwards alone run, with the least work on the busiest rank.

    Raises:
        PartitionError: They fit no memory.
    """
    num_ranks, device = here.transport.num_ranks, here.device
    link, limit = options.link(here.transport), parse_bytes(options.memory_limit)
    most = math.inf if limit is None else limit
    busy = (0.0,) * num_ranks
    cuts: dict[NetworkName, tuple[int, ...]] = {}
    rate = options.rate(device)
    for name, profile in profile_forwards(captured, device, flops_per_second=rate).items():
        calls = [captured.plan.calls[i] for i in captured.plan.calls_of(name)]
        seconds = [len(calls) * atom.forward[profile.sizes[-1]] for atom in profile.atoms]
        samples = sum(call.batch_size for call in calls)
        trunk = trunk_chain(profile, seconds, samples, link)
        found = Task(trunk, (), num_ranks, most, beside=busy).best()
        cuts[name], busy = found.cuts, found.busy
    log.info("evaluation: stages start at atoms %s", {k: v[:-1] for k, v in cuts.items()})
    own, other = cuts.get("student", ()), cuts.get("teacher", ())
    return Placement.of(num_ranks, own, other, schedule=options.schedule)
