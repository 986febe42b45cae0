"""Steps that were captured before: what goes to and fro is captured once.

::

    batch        0          1          2          3          4
    step         a          b          b          a          b
                 captured   captured   -          known      known

A known step needs no recording of its networks, no measuring and no search. Where all that it reads
lies as it would for the step before, it is cut as that one is, and nothing moves.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.plan import RunPlan
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.weights.ownership import Shards
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.training.module_weights import ModuleWeights
from lightning_tspipe.strategy.training.summary import summarize

Way = tuple[bool | None, ...]
"""Answers to what steps ask about how far the training is."""


@dataclass(eq=False)
class KnownStep:
    """A step that was captured.

    Attributes:
        captured: It.
        plan: By which it was placed.
        found: The networks that it was found to call; None if they have names.
        ways: Those that it is known to serve.
        loses: Whether it was seen to leave out of the loss what it trains.
    """

    captured: Captured
    plan: RunPlan
    found: Networks | None
    ways: set[Way] = field(default_factory=set)
    loses: bool = False

    def among(self, engine: Engine, present: RunPlan) -> RunPlan | None:
        """A plan by which this step needs nothing that is elsewhere; None if there is none.

        Args:
            engine: Another step's, with its stages.
            present: By which those were placed.
        """
        own, there = self.plan.placement, present.placement
        mine, others = self.captured.networks, engine.captured.networks
        if own is None or there is None or mine.keys() != others.keys():
            return None
        cuts: dict[NetworkName, tuple[int, ...]] = {}
        for name, network in mine.items():
            found = network.cuts_like(others[name], there.cuts[name], {})
            if found is None or any(start == stop for start, stop in pairwise(found)):
                return None
            cuts[name] = found
        placement = replace(
            there,
            student_cuts=cuts["student"],
            teacher_cuts=cuts.get("teacher", ()),
            num_microbatches=own.num_microbatches,
            recomputed=own.recomputed,
        )
        plan = replace(present, made_for=self.plan.made_for, placement=placement)
        return plan if self._lies(engine, placement) else None

    def _lies(self, engine: Engine, placement: Placement) -> bool:
        with suppress(PartitionError):
            for name, network in self.captured.networks.items():
                network.check_cuts(placement.cuts[name], ties=True)
            return Shards(engine.module, self.captured, placement).lies_as(engine.shards)
        return False

    def place(self, run: Run, weights: ModuleWeights, plan: RunPlan | None) -> PipelineEngine:
        """Give every rank its stages; every rank calls it.

        Args:
            run: The run.
            weights: What is put in the place of a network goes into it.
            plan: By which; None: as the step was placed before.
        """
        plan = plan or self.plan
        assert plan.placement is not None
        run.found = self.found
        here = replace(run.rank(), compiler=run.options.compiler)
        weights.keep(here.networks)
        run.resumption.place(plan, None)
        engine = PipelineEngine(
            here, self.captured, plan.placement, run.options.schedule, plan.costs
        )
        engine.tells_lost |= self.loses
        summarize(run, engine, plan.plan)
        return engine
