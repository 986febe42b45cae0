"""The first batch: share the weights, trace the step, decide who gets what, place the stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.networks.construction import Construction
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.plan import RunPlan
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.modes.frozen import Fanout, Prefix
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.frozen import refuse_teacher, with_frozen
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.materializing import Materializer, Source, is_on_meta
from lightning_tspipe.runtime.weights.ownership import named_tensors, put
from lightning_tspipe.strategy.setup.deciding import Decider, place_forwards
from lightning_tspipe.strategy.setup.fanout import HeadPlanner, heads_of
from lightning_tspipe.strategy.setup.freezing import Freezing, ask_front
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.plan_of_run import PlannedBy, changes, decided_once


@dataclass(frozen=True)
class InitialWeights:
    """Sources of the initial weights of a module.

    Attributes:
        construction: How parts that are on the meta device were built.
        source: A checkpoint that has values for them.
        placement: Of a module that is spread over the ranks already, and stays so.
    """

    construction: Construction = field(default_factory=Construction)
    source: Source | None = None
    placement: Placement | None = None


def share_weights(here: Rank, initial: InitialWeights) -> Materializer | None:
    """Every rank gets the weights of the loss rank, whatever its own random numbers were.

    Args:
        here: This rank; its replicas are the pipelines that are to have the first one's weights.
        initial: Where values come from that the loss rank has not.

    Returns:
        Where the values of the pipelined networks come from, if the loss rank has none.
    """
    module, transport, replicas = here.module, here.transport, here.replicas
    inside = tuple(f"{name}." for _, name in here.networks.items())
    # What is spread over the ranks already is not sent around.
    shared = {
        name: tensor
        for name, tensor in named_tensors(module)
        if initial.placement is None or not name.startswith(inside)
    }
    if transport.num_ranks * replicas.number > 1:
        _receive(here, shared)
    if initial.placement is not None or not is_on_meta(module):
        return None
    materializer = Materializer(module, initial.construction, initial.source)
    materializer.agree(transport, replicas)
    materializer.fill(lambda name: not name.startswith(inside))
    materializer.fill_attributes()
    return materializer


def set_up(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    here: Rank,
    options: SetupOptions,
    step: Step,
    batch: Any,
    initial: InitialWeights,
    training: PlannedBy | None = None,
) -> PipelineEngine:
    """Make this rank ready to train, or without a training to evaluate.

    Args:
        here: This rank.
        options: The user's.
        step: The step.
        batch: Its first batch, the same on all ranks of a pipeline.
        initial: Where values come from that the loss rank has not.
        training: What the training knows; None for an evaluation.

    Raises:
        CaptureError: The step can't be captured.
        PartitionError: The networks can't be cut as asked for, or fit no memory. Both on every
            rank, and with the module untouched.
    """
    heads = heads_of(here, None if training is None else training.features)
    if heads is not None:
        here = replace(here, mode=Fanout(heads))
    materializer = share_weights(here, initial)
    captured = here.capture(step, batch, training=training is not None)
    plan: RunPlan | None = None
    if heads is not None:
        plan = HeadPlanner(here, heads, captured, options, step, batch, training).plan()
    if training is None:
        forwards = partial(place_forwards, here, captured, options)
        placement = plan.placement if plan else decided_once(here, forwards)
        assert placement is not None
        here = replace(here, replicas=Replicas())  # nothing is summed over them
        return PipelineEngine(here, captured, placement, "gpipe", None, materializer)
    here, captured, num_frozen = _without_frozen(here, captured, training.freezing)
    if plan is None:
        plan = Decider(here, captured, options, training, num_frozen).agree(initial.placement)
        plan = _executed_as_chosen(plan, captured, options)
    assert plan.placement is not None
    tell = partial(changes, plan=plan, captured=captured, repacks=training.freezing.is_on)
    is_first = here.transport.rank == LOSS_RANK and here.replicas.is_first
    training.run.place(plan, tell if is_first else None)
    engine = PipelineEngine(
        replace(here, compiler=options.compiler), captured, plan.placement, options.schedule,
        plan.costs, materializer, options.policy,
    )  # fmt: skip
    if engine.weights is not None:
        engine.weights.optimizers = list(training.optimizers)
    begin(engine, initial, training.optimizers)
    return engine


def _without_frozen(
    here: Rank, captured: Captured, freezing: Freezing
) -> tuple[Rank, Captured, int]:
    """What is frozen becomes a network before the student; also returns its number of atoms."""
    if freezing.is_on:
        refuse_teacher(captured)
    captured, part = with_frozen(captured, freezing.names, freezing.front)
    ask_front(part, here, captured, freezing)
    if part is None:
        return here, captured, 0
    return replace(here, mode=Prefix(part)), captured, part.num_frozen


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


def begin(
    engine: Engine, initial: InitialWeights, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """The stages are placed: let go of what only their placement needed."""
    if engine.materializer is not None:
        engine.materializer.done()
    engine.shards.stays_spread |= initial.placement is not None
    for optimizer in optimizers:
        engine.shards.forget_optimizer_state(optimizer)


def _receive(here: Rank, shared: Mapping[str, Tensor]) -> None:
    """Take the loss rank's values, of all that has values there."""
    transport, replicas = here.transport, here.replicas
    mine = transport.rank == LOSS_RANK and replicas.is_first
    state = None
    if mine:
        state = {name: t.detach().cpu() for name, t in shared.items() if not t.is_meta}
    if transport.rank == LOSS_RANK:
        state = replicas.broadcast(state)
    state = transport.broadcast_object(state, LOSS_RANK)
    if mine:
        return
    for name, value in state.items():
        if shared[name].is_meta:
            put(here.module, shared[name], value)
        else:
            with torch.no_grad():
                shared[name].copy_(value)
