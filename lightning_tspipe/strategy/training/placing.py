"""The first batch: trace the step, agree on who gets what, place the stages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tspipe.capture.discovery import Finder
from lightning_tspipe.capture.trace import Networks, Step
from lightning_tspipe.errors import FedByTrainedError, PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.moving import forget_graphs
from lightning_tspipe.planning.plan import Plan, RunPlan
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.modes.frozen import Fanout, Prefix
from lightning_tspipe.runtime.stages.captured import Captured, UndividedError
from lightning_tspipe.runtime.stages.frozen import refuse_teacher, with_frozen
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.materializing import Materializer
from lightning_tspipe.schedules.windows import WINDOWS
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import are_named, checked
from lightning_tspipe.strategy.setup.freezing import ask_front
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.refusals import refuse
from lightning_tspipe.strategy.setup.resumption import changes, decided_once
from lightning_tspipe.strategy.training.deciding import Decider, place_forwards
from lightning_tspipe.strategy.training.fanout import HeadPlanner, heads_of
from lightning_tspipe.strategy.training.module_weights import ModuleWeights
from lightning_tspipe.strategy.training.optimizers import plain_optimizer
from lightning_tspipe.strategy.training.summary import summarize
from lightning_tspipe.strategy.training.windows import (
    teacher_ahead,
    tell_of_idle,
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
    with run.timed("capture"):
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
    with run.timed("place"):
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
