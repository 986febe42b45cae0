"""The first batch: trace the step, decide who gets what, and place the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.planning.run_plan import RunPlan
from lightning_tspipe.runtime.execution.mode import TrainingMode
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.modes.chain import Chain, Prefix
from lightning_tspipe.runtime.modes.fanout import Fanout
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.frozen import refuse_teacher, with_frozen
from lightning_tspipe.runtime.stages.heads import FeatureCache
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.strategy.setup.asynchronous import policy_for, use_optimizers
from lightning_tspipe.strategy.setup.deciding import agree
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.setup.fanout import heads_of, place_heads
from lightning_tspipe.strategy.setup.freezing import Freezing, ask_front
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.plan_of_run import PlanOfRun, changes
from lightning_tspipe.strategy.setup.weight_source import InitialWeights, share_weights


def set_up(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    module: nn.Module,
    options: SetupOptions,
    transport: Transport,
    device: torch.device,
    context: Callable[[], AbstractContextManager[None]],
    step: Step,
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    replicas: Replicas,
    initial: InitialWeights,
    freezing: Freezing,
    run: PlanOfRun,
    features: FeatureCache | None,
    reading: float,
    stop: Stop,
    recorder: Recorder,
) -> PipelineEngine:
    """Make this rank ready to train; all ranks of its pipeline have the same first batch.

    What is not said elsewhere: ``reading`` is how many seconds the data rank takes to read a batch,
    and ``run`` knows the plan of the checkpoint that the run goes on from.

    Raises:
        CaptureError: The step can't be captured.
        PartitionError: The networks can't be cut as asked for.
    """
    networks = find_networks(module, options)
    seed = transport.broadcast_object(torch.initial_seed() % 2**31, LOSS_RANK)
    heads = heads_of(module, networks, device, replicas, features)
    mode: TrainingMode = Chain() if heads is None else Fanout(heads)
    here = Rank(
        module, networks, transport, device, mode, seed, context, replicas, options.compiler, stop,
        recorder,
    )  # fmt: skip
    materializer = share_weights(module, networks, transport, replicas, initial)
    captured = here.capture(step, batch)
    if freezing.is_on:
        refuse_teacher(captured)
    captured, part = with_frozen(captured, freezing.names, freezing.front)
    if part is not None:
        here = replace(here, mode=Prefix(part))
    ask_front(part, captured, freezing, context, device)
    if heads is not None:
        plan = place_heads(here, heads, captured, options, step, batch, optimizers, reading, run)
    else:
        plan = agree(
            captured, options, transport, device, optimizers, replicas, initial, freezing,
            0 if part is None else part.num_frozen, run,
        )  # fmt: skip
        plan = _executed_as_chosen(plan, captured, options)
    placement = plan.placement
    assert placement is not None
    tell = partial(changes, plan=plan, captured=captured, repacks=freezing.is_on)
    is_first = transport.rank == LOSS_RANK and replicas.is_first
    run.place(plan, tell if is_first else None)
    engine = PipelineEngine(
        here, captured, placement, options.schedule, plan.costs, materializer, policy_for(options)
    )
    if engine.weights is not None:
        use_optimizers(engine.weights, optimizers)
    if materializer is not None:
        materializer.done()
    engine.shards.stays_spread |= initial.placement is not None
    for optimizer in optimizers:
        engine.shards.forget_optimizer_state(optimizer)
    return engine


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
