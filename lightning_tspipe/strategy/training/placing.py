"""The first batch: trace the step, agree on who gets what, place the stages."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tspipe.capture.discovery import Finder
from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.capture.trace import Networks, Step
from lightning_tspipe.errors import FedByTrainedError, PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.moving import forget_graphs
from lightning_tspipe.planning.heads import Task, trunk_chain
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.plan import Plan, RunPlan
from lightning_tspipe.planning.step_profile import StepProfile, keep_or_recompute
from lightning_tspipe.profiling.steps import profile_forwards, profile_step
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.modes.frozen import Fanout, Prefix
from lightning_tspipe.runtime.stages.captured import Captured, UndividedError
from lightning_tspipe.runtime.stages.frozen import parameter_names, refuse_teacher, with_frozen
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.stages.network import is_paired
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.materializing import Materializer
from lightning_tspipe.runtime.weights.ownership import beside_stages
from lightning_tspipe.schedules.windows import WINDOWS
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import are_named, checked
from lightning_tspipe.strategy.setup.freezing import ask_front, of_plan, place_frozen
from lightning_tspipe.strategy.setup.options import SetupOptions, parse_bytes
from lightning_tspipe.strategy.setup.refusals import refuse
from lightning_tspipe.strategy.setup.resumption import changes, decided_once, made_for
from lightning_tspipe.strategy.training.fanout import HeadPlanner, heads_of
from lightning_tspipe.strategy.training.module_weights import ModuleWeights
from lightning_tspipe.strategy.training.optimizers import plain_optimizer
from lightning_tspipe.strategy.training.summary import summarize
from lightning_tspipe.strategy.training.windows import (
    runs_of,
    teacher_ahead,
    tell_of_idle,
    window_of,
)

log = logging.getLogger("lightning_tspipe")


def set_up(
    run: Run, weights: ModuleWeights, step: Step, batch: Any, *, trains: bool
) -> PipelineEngine:
    """Make this rank ready to train, or to evaluate without a training.

    Args:
        run: The run.
        weights: Where values come from that the loss rank has not.
        step: The step.
        batch: Its first batch, the same on all ranks of a pipeline.
        trains: Whether it is a training's.

    Raises:
        CaptureError: The step can't be captured.
        PartitionError: The networks can't be cut as asked for, or fit no memory. Both on every
            rank, and with the module untouched.
    """
    with _told_what_was_found(run):
        return _set_up(run, weights, step, batch, trains=trains)


@contextmanager
def _told_what_was_found(run: Run) -> Iterator[None]:
    """Say of networks that have no names and can't be cut, which they are."""
    try:
        yield
    except PartitionError as error:
        found = run.found
        names = () if found is None else (*found.student, *found.teacher)
        known = (name for name, part in run.module.named_children() if [*part.parameters()])
        beside = [n for n in known if not any(f"{m}.".startswith(f"{n}.") for m in names)]
        if found is None or not beside:
            raise
        order = {name: place for place, (name, _) in enumerate(run.module.named_modules())}
        student = sorted([*beside, *found.student], key=order.__getitem__)
        raise PartitionError(
            f"{error}. Found by the step were {', '.join(names)}; {', '.join(beside)} lie beside "
            "the loss. Name what is to be cut, in the order of its calls: "
            f"TSPipeStrategy(student={student!r})"
        ) from error


def _set_up(
    run: Run, weights: ModuleWeights, step: Step, batch: Any, *, trains: bool
) -> PipelineEngine:
    first = _First(run, weights, step, batch, trains)
    run.found = None if are_named(run.module, run.options) else first.find()
    here, heads, materializer, captured = first.capture()
    options, freezing = run.options, run.freezing
    plan: RunPlan | None = None
    if heads is not None:
        plan = HeadPlanner(run, here, heads, captured, step, batch, trains).plan()
    if not trains:
        forwards = partial(place_forwards, here, captured, options)
        placement = plan.placement if plan else decided_once(here, forwards)
        assert placement is not None
        here = replace(here, replicas=Replicas())  # nothing is summed over them
        return PipelineEngine(here, captured, placement, "gpipe", None, materializer)
    fed_at = captured.plan.fed_at
    refuse({
        f"schedule={options.schedule!r} runs students batches ahead, where their teacher has not "
        f"run yet, and at {fed_at} a trained network is given what a forward-only one gave. Use "
        "schedule='tspipe'": bool(fed_at) and options.schedule in WINDOWS
    })  # fmt: skip
    if freezing.is_on:
        refuse_teacher(captured)
    captured, part = with_frozen(captured, freezing.names)
    if part is not None:
        ask_front(part, here, captured, freezing)
        here = replace(here, mode=Prefix(part))
    is_first = here.transport.rank == LOSS_RANK and here.replicas.is_first
    if plan is None:
        num_frozen = 0 if part is None else part.num_frozen
        options = _divided(options, captured, tells=is_first)
        plan = Decider(run, options, here, captured, num_frozen).agree()
        plan = _executed_as_chosen(plan, captured, options)
    assert plan.placement is not None
    tell = partial(changes, plan=plan, captured=captured, repacks=freezing.is_on)
    run.resumption.place(plan, tell if is_first else None)
    engine = PipelineEngine(
        replace(here, compiler=options.compiler), captured, plan.placement, options.schedule,
        plan.costs, materializer, options.policy, teacher_ahead(run, captured.plan),
    )  # fmt: skip
    _tell(run, engine, plan.plan)
    return engine


def _tell(run: Run, engine: PipelineEngine, plan: Plan | None) -> None:
    """The run and its user know what was placed."""
    if engine.weights is not None:
        engine.weights.optimizers = list(map(plain_optimizer, run.optimizers))
    summarize(run, engine, plan)
    if engine.is_loss_rank and run.replicas.is_first:
        log.info("%s", run.summary)
        tell_of_idle(run, engine)
        if run.options.num_microbatches == "auto":
            _tell_of_batchnorm(engine.captured, engine.placement.num_microbatches)


def _divided(options: SetupOptions, captured: Captured, *, tells: bool) -> SetupOptions:
    """The options; where micro-batches are left to the plan and can't be, with whole batches.

    Args:
        options: The user's.
        captured: The step.
        tells: Whether this rank says so.
    """
    reason = captured.undivided if options.num_microbatches == "auto" else ""
    return _undivided(options, reason, tells=tells) if reason else options


def _undivided(options: SetupOptions, reason: str, *, tells: bool) -> SetupOptions:
    if tells:
        log.warning("each call gets the whole batch: %s", reason)
    return replace(options, num_microbatches=1)


def whole_batches(run: Run, engine: PipelineEngine, mixing: str) -> SetupOptions:
    """The options with whole batches, where a network mixes the samples of a batch.

    Args:
        run: The run.
        engine: Its engine, which divides batches.
        mixing: The call, and where the step makes it.

    Raises:
        UndividedError: Micro-batches were asked for, or the stages can't be placed anew.
    """
    reason = (
        f"what {mixing}, gives for a sample depends on the other samples of the batch: micro-"
        "batches give other numbers"
    )
    options = run.options
    is_asked_for = options.num_microbatches != "auto" or options.plan is not None
    if is_asked_for or engine.shards.stays_spread:
        raise UndividedError(
            reason,
            "Use TSPipeStrategy(num_microbatches=1), which runs whole batches, or compute what "
            "belongs to the batch (a mean, say) in training_step",
        )
    return _undivided(options, reason, tells=engine.is_loss_rank and run.replicas.is_first)


class _First(NamedTuple):
    """The first step of a run, of which it is seen what there is to be placed."""

    run: Run
    weights: ModuleWeights
    step: Step
    batch: Any
    trains: bool

    def find(self) -> Networks | None:
        """The networks that it calls; None if it calls none.

        Raises:
            CaptureError: The step can't be run for it.
        """
        module = self.run.module
        forget_graphs(module)  # before copies of attributes hold on to them
        with nullcontext() if self.trains else torch.no_grad():
            finder = Finder(module, self.run.root_device, num_ranks=self.run.num_ranks)
            found = finder.find(self.step, self.batch, seed=0)
        return checked(module, found) if found.student else None

    def with_what_feeds(self, error: FedByTrainedError) -> Networks | None:
        """The networks, of which one gets what something else that is trained has made.

        Raises:
            FedByTrainedError: That can't be a part of it.
        """
        run = self.run
        if run.options.student is None and run.found is None:
            # Of `student` and `teacher`, which nobody has named: more than those may be networks.
            found = self.find()
            if found is None:
                raise error
            return found
        known = run.networks
        if not error.before or error.network == "teacher" or error.before in known.student:
            raise error
        if run.is_global_zero:
            log.info("%r feeds the student: it becomes its first part", error.before)
        student = (error.before, *known.student)
        found = replace(known, student=student, averages=known.pairs, is_found=True)
        return checked(run.module, found)

    def capture(self) -> tuple[Rank, Heads | None, Materializer | None, Captured]:
        """This rank, and what it is to place, with whatever feeds it."""
        while True:
            try:
                return self._capture()
            except FedByTrainedError as error:
                self.run.found = self.with_what_feeds(error)

    def _capture(self) -> tuple[Rank, Heads | None, Materializer | None, Captured]:
        here = self.run.rank()
        self.weights.keep(here.networks)
        heads = heads_of(here, self.run.features if self.trains else None)
        if heads is not None:
            here = replace(here, mode=Fanout(heads))
        materializer = self.weights.share(here)
        captured = here.capture(self.step, self.batch, training=self.trains)
        return here, heads, materializer, captured


def _tell_of_batchnorm(captured: Captured, number: int) -> None:
    """Say over how many samples BatchNorm normalises, if it is not the whole batch."""
    modules = [module for network in captured.networks.values() for module in network.modules]
    normalises = any(isinstance(m, _BatchNorm) and m.training for m in modules)
    if normalises and number > 1:
        size = max(call.batch_size for call in captured.plan.calls)
        log.warning(
            "BatchNorm normalises over the %d samples of a micro-batch, of %d in a batch, which "
            "gives other numbers than one device. TSPipeStrategy(num_microbatches=1) normalises "
            "whole batches",
            size // number, size,
        )  # fmt: skip


def _executed_as_chosen(plan: RunPlan, captured: Captured, options: SetupOptions) -> RunPlan:
    """The plan with the atoms that run again; what runs again or is compiled is not split."""
    placement = plan.placement
    assert placement is not None
    again = options.recomputed([atom.name for atom in captured.networks["student"].atoms])
    if again:
        placement = replace(placement, recomputed=again)
    if again or options.compile:
        placement = replace(placement, split=frozenset())
    return replace(plan, placement=placement)


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
        rate, counts = options.rate(device), options.microbatch_counts
        optimizers = list(map(plain_optimizer, self.run.optimizers))
        ties = options.policy is None or options.policy.is_synchronous
        beside = beside_stages(self.here.module, captured)
        profile = profile_step(captured, device, optimizers, counts, rate, ties=ties, beside=beside)
        names = [atom.name for atom in profile.student.atoms]
        if options.zero_stage:
            profile = profile.dividing_state(self.here.replicas.number)
        profile = profile.recomputing(options.recomputed(names))
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

        text = ""
        is_limited = constraints["memory_limit"] is not None or limit is not None
        if options.activation_checkpointing == "auto" and is_limited:
            profile, decided = keep_or_recompute(profile, best)
            if profile.student.recomputed:
                text = "\nactivation_checkpointing='auto' was switched on: no other fit is as fast"
        else:
            decided = best(profile)
        told = f"{decided}{text}\nlink between neighbours: {constraints['link']}"
        return of_plan(decided, self.num_frozen), told, profile, decided

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
