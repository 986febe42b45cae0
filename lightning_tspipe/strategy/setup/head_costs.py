"""Measure, or count, what a trunk and the heads on it cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_tspipe.capture import swap
from lightning_tspipe.capture.plan import StepPlan, ValueRef
from lightning_tspipe.capture.replay import StepRunner, silenced
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.planning.heads import HeadCost, TrunkCost
from lightning_tspipe.planning.pieces import WHOLE, Pieces, choose_pieces
from lightning_tspipe.profiling import profile_forwards
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.strategy.setup.machine import link_of, nominal_rate
from lightning_tspipe.strategy.setup.options import SetupOptions

_NUM_TIMED = 3
_UPDATE_SECONDS_PER_BYTE = 2.5e-10
_PIECES = (1, 2, 4, 8)


def trunk_cost(
    here: Rank, captured: Captured, options: SetupOptions, ends: Sequence[int]
) -> tuple[TrunkCost, Pieces]:
    """The cost of the trunk, and the part of it that runs in pieces of a batch."""
    calls = [captured.plan.calls[i].input for i in captured.plan.calls_of("teacher")]
    given = 1 if options.num_microbatches == "auto" else options.num_microbatches
    batch_size = max(spec.shape[0] for spec in calls)
    counts = [count for count in _PIECES if count <= batch_size] if ends else [given]
    rate = nominal_rate(here.device) if options.plans_by_flops else None
    profile = profile_forwards(captured, here.device, counts, rate)["teacher"]
    size, pieces = max(1, math.ceil(batch_size / given)), WHOLE
    if ends:
        whole = next(spec for spec in calls if spec.shape[0] == batch_size)
        pieces = choose_pieces(profile, batch_size, whole.num_bytes // batch_size, ends)
    factor, samples = len(calls) * given, sum(spec.shape[0] for spec in calls)
    latency, bandwidth = link_of(here.transport, by_flops=options.plans_by_flops)
    costs = TrunkCost(
        tuple(factor * seconds for seconds in pieces.seconds(profile, size)),
        tuple(atom.parameter_bytes for atom in profile.atoms),
        tuple(
            given * latency + samples * atom.output_bytes_per_sample / bandwidth
            for atom in profile.atoms
        ),
        tuple(atom.name for atom in profile.atoms),
        frozenset(index for index, atom in enumerate(profile.atoms) if atom.joined),
    )
    return costs, pieces


def ends_of_pieces(here: Rank, captured: Captured, options: SetupOptions) -> list[int]:
    """Numbers of the trunk's atoms that may run in pieces: they pass on a row per sample.

    None if the samples of a batch may matter to each other, or the user said how many go together.
    """
    trunk = here.module.get_submodule("teacher")
    if options.num_microbatches != "auto" or any(part.training for part in trunk.modules()):
        return []
    network, plan = captured.networks["teacher"], captured.plan
    calls = [plan.calls[index] for index in plan.calls_of("teacher")]
    batch_size = max(call.input.shape[0] for call in calls)
    known = []
    for size in {batch_size, math.ceil(batch_size / _PIECES[-1])}:
        spec = replace(calls[0].input, shape=(size, *calls[0].input.shape[1:]))
        shapes = network.shapes(spec, calls[0].num_links, here.context, grad=False)
        known.append([{s.shape[:1] for s in specs} == {(size,)} for specs in shapes.boundaries])
    return [
        end
        for end in range(1, len(network.atoms))
        if all(rows[end] for rows in known) and not network.outputs_between(0, end)
    ]


def head_costs(  # noqa: PLR0913, PLR0917 - what a head's step needs
    here: Rank,
    heads: Heads,
    plan: StepPlan,
    step: Step,
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    rate: float | None,
) -> list[HeadCost]:
    """Time each head's own step on stand-ins for the features; nothing of it is left.

    With a rate, in operations per second, its operations are counted instead.
    """
    module, student = here.module, heads.student
    student.to(here.device)
    features = stand_ins(plan, here.device)
    runner = StepRunner(module, here.networks, plan, is_loss_rank=True)
    costs = []
    with swap.attributes_restored(list(module.modules()), tensors=False), silenced(module):
        for name in student.names:
            head = student.heads[name]
            with swap.attributes_restored(list(head.modules()), tensors=True):

                def run(name: str = name) -> None:
                    with student.trains((name,), rehearses=True), here.context():
                        loss = runner.replay(step, batch, 0, lambda c, r: features[c, r])
                    loss.backward()

                seconds = _timed(run, here.device) if rate is None else _counted(run) / rate
            for parameter in head.parameters():
                parameter.grad = None
            size = sum(p.nbytes for p in head.parameters())
            held = round(size * (2 + _moments(head, optimizers)))
            update = held * _UPDATE_SECONDS_PER_BYTE
            costs.append(HeadCost(name, seconds + update, held))
    return costs


def _timed(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of the fastest of some runs, after one that is not counted."""
    seconds = []
    for _ in range(1 + _NUM_TIMED):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _counted(run: Callable[[], None]) -> int:
    """Floating-point operations of a run."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def prologue_seconds(here: Rank, plan: StepPlan, step: Step, batch: Any) -> float:
    """Seconds that the data rank takes to make the trunk's input of a batch; no effect is left."""
    runner = StepRunner(
        here.module, here.networks, plan, is_loss_rank=True, beginning=here.mode.prologue
    )
    seconds = []
    for _ in range(1 + _NUM_TIMED):
        started = time.perf_counter()
        runner.inputs(step, batch, 0, effects=False)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def stand_ins(plan: StepPlan, device: torch.device) -> dict[tuple[int, ValueRef], Tensor]:
    """Random features, by call and place."""
    generator = torch.Generator().manual_seed(0)
    return {
        (each.call, ValueRef(each.position, slot)): (
            torch.randn(spec.shape, generator=generator).to(device, spec.dtype)
            if spec.dtype.is_floating_point
            else torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        )
        for each in plan.interceptions
        for slot, spec in enumerate(each.leaves)
        if spec is not None
    }


def _moments(head: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Tensors of the size of a parameter that its optimizer keeps."""
    own = {id(parameter) for parameter in head.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(id(parameter) in own for parameter in group["params"]):
                return 2 if "betas" in group else int(bool(group.get("momentum", 0)))
    return 0
