"""Heads on a frozen trunk: what they cost, and who trains which, found at the first batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import TensorSpec, ValueRef
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.networks import swap
from lightning_tspipe.planning.heads import (
    HeadCost,
    Spread,
    Task,
    choose_pieces,
    seconds_in_pieces,
    trunk_chain,
)
from lightning_tspipe.planning.partition import Chain
from lightning_tspipe.planning.placement import WHOLE, Pieces, Placement
from lightning_tspipe.planning.plan import RunPlan
from lightning_tspipe.profiling.atoms import seconds_of
from lightning_tspipe.profiling.steps import UPDATE_SECONDS_PER_BYTE, moments, profile_forwards
from lightning_tspipe.replay.runner import StepRunner
from lightning_tspipe.runtime.execution.engine import Rank
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.heads import FeatureCache, Heads
from lightning_tspipe.runtime.stages.routes import of_samples
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.options import parse_bytes
from lightning_tspipe.strategy.setup.resumption import decided_once, made_for

log = logging.getLogger("lightning_tspipe")

_NUM_TIMED = 3
_PIECES = (1, 2, 4, 8)


def heads_of(here: Rank, cache: FeatureCache | None = None) -> Heads | None:
    """The heads of a module as stages; None if its student is something else.

    Raises:
        ConfigurationError: Several replicas of the pipeline.
    """
    if not here.networks.local:
        return None
    if here.replicas.number > 1:
        raise ConfigurationError(
            f"num_stages with {here.replicas.number} replicas: heads on a trunk are divided among "
            "all devices. Leave num_stages out"
        )
    return Heads(here.module, here.networks.local[0], here.device, cache)


@dataclass(frozen=True)
class HeadPlanner:
    """Measures trunk and heads on one rank, and agrees on who gets what.

    Attributes:
        run: The run.
        here: This rank.
        heads: The heads.
        captured: The step.
        step: The step.
        batch: Its batch, on all ranks.
        trains: Whether heads are trained.
    """

    run: Run
    here: Rank
    heads: Heads
    captured: Captured
    step: Step
    batch: Any
    trains: bool

    def plan(self) -> RunPlan:
        """The plan, the same on all ranks.

        Raises:
            PartitionError: Nothing fits the memory.
        """
        names = list(self.heads.student.names)
        wanted = made_for(self.run.options, self.here, self.captured) | {"heads": names}
        found = self.run.resumption.reuse(wanted) if self.trains else None
        if found is not None and self.heads.cache is None:
            return found
        decided = decided_once(self.here, self._decide)
        # Measured for the cache only, if there is a plan already.
        return found or RunPlan(wanted, self.run.options.source, decided)

    def _decide(self) -> Placement:
        """Measure, and place trunk and heads."""
        here, options, cache = self.here, self.run.options, self.heads.cache
        num_ranks, names = here.transport.num_ranks, self.heads.student.names
        number, pieces = options.given_microbatches, WHOLE
        if num_ranks > 1 or cache is not None:
            ends = self._ends_of_pieces()
            trunk, pieces = self._trunk_cost(ends)
            costs = self._head_costs(trunk)
            beside = [0.0] * num_ranks
            if num_ranks > 1 and not options.plans_by_flops:
                beside[-1] = self._prologue_seconds()
            limit = parse_bytes(options.memory_limit)
            if self.trains:
                limit = options.bytes_on(here.device)
            most, given = math.inf if limit is None else limit, self._given_cuts(trunk)
            found = Task(trunk, costs, num_ranks, most, given, beside).best()
            pieces = pieces.within(found.cuts[1], ends)
            if num_ranks > 1:
                log.info(
                    "heads on a trunk, %d pieces per batch, %d in the trunk's first %d atoms\n%s",
                    number, pieces.number, pieces.num_atoms, found.describe(costs),
                )  # fmt: skip
            if cache is not None:
                stand_ins = list(self._stand_ins().values())
                cache.consider(sum(trunk.costs) / len(found.ranks), stand_ins)
        else:  # all of it is here
            atoms = len(self.captured.networks["teacher"].atoms)
            found = Spread((0, atoms), (0,), (0,) * len(names), (0.0,), (0,))
        return Placement(
            num_ranks=num_ranks,
            student_cuts=tuple(range(len(names) + 1)),
            student_ranks=found.head_ranks,
            teacher_cuts=found.cuts,
            teacher_ranks=found.ranks,
            num_microbatches=number,
            depth=self._depth(len(found.ranks)),
            pieces=pieces,
        )

    def _depth(self, num_stages: int) -> int:
        """How far a trunk runs ahead: not at all if it draws random numbers.

        What ran ahead runs again in a run that goes on, and would draw other ones.

        Raises:
            ConfigurationError: The user wants it to.
        """
        said, plan = self.run.options.queue_depth, self.captured.plan
        depth = num_stages if said == "auto" else said
        matters = depth and self.here.transport.num_ranks > 1 and self.trains
        if not matters or not self.captured.networks["teacher"].draws(plan):
            return depth
        if said != "auto":
            raise ConfigurationError(
                f"queue_depth={depth}: the trunk draws random numbers (dropout, in train mode?), "
                "and a resumed run would draw different ones for the batches that it is ahead. Put "
                "it into eval mode in on_train_start, or set queue_depth=0"
            )
        log.warning(
            "the trunk draws random numbers (dropout, in train mode?): it does not run ahead of "
            "the heads, which is slower. Put it into eval mode if its features should always be "
            "the same"
        )
        return 0

    def _given_cuts(self, trunk: Chain) -> tuple[int, ...] | None:
        """Where the user cuts the trunk.

        Raises:
            PartitionError: Not all of it, or into more stages than there are ranks.
        """
        counts: Any = self.run.options.partition
        num_ranks, number = self.here.transport.num_ranks, len(trunk.costs)
        if isinstance(counts, Mapping):
            counts = counts.get("teacher", "auto")
        if isinstance(counts, str) or num_ranks == 1:
            return None
        if sum(counts) != number or min(counts) < 1 or len(counts) > num_ranks:
            raise PartitionError(
                f"partition={list(counts)}: the numbers of the trunk's atoms on each stage must "
                f"add up to {number}, for at most {num_ranks} stages"
            )
        return (0, *accumulate(counts))

    # What is measured, or counted

    def _trunk_cost(self, ends: list[int]) -> tuple[Chain, Pieces]:
        """The cost of the trunk, and the part of it that runs in pieces of a batch."""
        here, options, plan = self.here, self.run.options, self.captured.plan
        calls = [plan.calls[index] for index in plan.calls_of("teacher")]
        given = options.given_microbatches
        batch_size = max(call.batch_size for call in calls)
        counts = [count for count in _PIECES if count <= batch_size] if ends else [given]
        rate = options.rate(here.device)
        profile = profile_forwards(self.captured, here.device, counts, rate)["teacher"]
        size, pieces = max(1, math.ceil(batch_size / given)), WHOLE
        if ends:
            whole = next(call.inputs for call in calls if call.batch_size == batch_size)
            num_bytes = sum(spec.num_bytes for spec in whole)
            pieces = choose_pieces(profile, batch_size, num_bytes // batch_size, ends)
        factor, samples = len(calls) * given, sum(call.batch_size for call in calls)
        seconds = [factor * each for each in seconds_in_pieces(pieces, profile, size)]
        link = options.link(here.transport)
        return trunk_chain(profile, seconds, samples, link, given), pieces

    def _ends_of_pieces(self) -> list[int]:
        """Numbers of the trunk's atoms that may run in pieces: they pass on a row per sample.

        None if the samples of a batch may matter to each other, or the user said how many go
        together.
        """
        trunk = self.here.module.get_submodule("teacher")
        if self.run.options.num_microbatches != "auto" or any(m.training for m in trunk.modules()):
            return []
        plan, (chain, *others) = self.captured.plan, self.captured.networks["teacher"].routes
        if others:
            return []
        calls = [plan.calls[index] for index in plan.calls_of("teacher")]
        batch_size = max(call.batch_size for call in calls)
        known = []
        for size in {batch_size, math.ceil(batch_size / _PIECES[-1])}:
            shapes = chain.shapes(*of_samples(calls[0].inputs, size), grad=False)
            known.append([{s.shape[:1] for s in specs} == {(size,)} for specs in shapes.boundaries])
        return [
            end
            for end in range(1, len(chain.atoms))
            if all(rows[end] for rows in known) and not chain.outputs_between(0, end)
        ]

    def _head_costs(self, trunk: Chain) -> list[HeadCost]:
        """Time each head's own step on stand-ins for the features; nothing of it is left."""
        module, student, device = self.here.module, self.heads.student, self.here.device
        if not self.trains:  # forwards only
            return [HeadCost(name, sum(trunk.costs) / 10) for name in student.names]
        student.to(device)
        features, rate = self._stand_ins(), self.run.options.rate(device)
        runner = StepRunner(module, self.here.networks, self.captured.plan, is_loss_rank=True)
        costs = []
        with swap.attributes_restored(list(module.modules()), tensors=False), swap.silenced(module):
            for name in student.names:
                head = student.heads[name]
                with swap.attributes_restored(list(head.modules()), tensors=True):

                    def run(name: str = name) -> None:
                        with student.trains((name,), rehearses=True), self.here.context():
                            loss = runner.replay(
                                self.step, self.batch, 0, lambda c, r: features[c, r]
                            )
                        loss.backward()

                    seconds = seconds_of(run, device, _NUM_TIMED, rate)
                for parameter in head.parameters():
                    parameter.grad = None
                size = sum(p.nbytes for p in head.parameters())
                held = round(size * (2 + _moments(head, self.run.optimizers)))
                costs.append(HeadCost(name, seconds + held * UPDATE_SECONDS_PER_BYTE, held))
        return costs

    def _prologue_seconds(self) -> float:
        """Seconds that the data rank takes to read a batch and make the trunk's input of it."""
        here, reading = self.here, self.run.shortest_reading if self.trains else 0.0
        runner = StepRunner(
            here.module, here.networks, self.captured.plan, is_loss_rank=True,
            beginning=here.mode.prologue,
        )  # fmt: skip

        def inputs() -> None:
            runner.inputs(self.step, self.batch, 0, effects=False)

        return reading + seconds_of(inputs, here.device, _NUM_TIMED)

    def _stand_ins(self) -> dict[tuple[int, ValueRef], Tensor]:
        """Random features, by call and place."""
        generator, device = torch.Generator().manual_seed(0), self.here.device
        return {
            (each.call, ValueRef(each.position, slot)): spec.random(generator, device)
            for each in self.captured.plan.interceptions
            for slot, spec in enumerate(each.leaves)
            if isinstance(spec, TensorSpec)
        }


def _moments(head: nn.Module, optimizers: Sequence[Any]) -> int:
    """Tensors that the optimizer of a head keeps for each of its parameters."""
    own = set(map(id, head.parameters()))
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return next((moments(group) for group in groups if own & set(map(id, group["params"]))), 0)
