"""A captured step on its ranks: the pipeline, and the programs of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_tspipe.capture.plan import NetworkName, StepPlan
from lightning_tspipe.ir.lowering import Program, lower
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.runtime.network import ChainNetwork
from lightning_tspipe.runtime.weights import LOSS_RANK
from lightning_tspipe.schedules.registry import build_schedule
from lightning_tspipe.simulation.cost import CostTable


@dataclass(frozen=True)
class Captured:
    """A step after the trace: the plan and the networks that it calls."""

    plan: StepPlan
    networks: dict[NetworkName, ChainNetwork]


def layout(
    captured: Captured,
    ranks: Mapping[NetworkName, tuple[int, ...]],
    cuts: Mapping[NetworkName, tuple[int, ...]],
    num_microbatches: int,
    num_ranks: int,
) -> Pipeline:
    """The pipeline of a captured step; the last rank reads the data.

    Args:
        captured: The step.
        ranks: The rank of each stage of each network.
        cuts: Their cuts.
        num_microbatches: Micro-batches per call.
        num_ranks: Ranks of the pipeline.
    """
    layouts = {
        name: NetworkLayout(
            ranks[name],
            len(captured.plan.calls_of(name)),
            num_microbatches,
            network.output_stages(cuts[name]),
        )
        for name, network in captured.networks.items()
    }
    # An evaluation may call the teacher only.
    no_student = NetworkLayout(ranks["student"], 0, num_microbatches, frozenset())
    student, teacher = layouts.get("student", no_student), layouts.get("teacher")
    return Pipeline(num_ranks, student, teacher, num_ranks - 1, LOSS_RANK)


class Programs:
    """The validated programs of a pipeline's steps; the same on all ranks.

    Args:
        pipeline: The pipeline.
        schedule: ``tspipe``, ``gpipe`` or ``sequential``.
        costs: Costs of the stages, for the order of actions; None for equal ones.
        split: Student stages whose backwards may run in two halves.
    """

    def __init__(
        self, pipeline: Pipeline, schedule: str, costs: CostTable | None, split: frozenset[int]
    ) -> None:
        self._pipeline = pipeline
        self._schedule = schedule
        self._costs = costs or CostTable.uniform(pipeline)
        self._split = split
        self._known: dict[tuple[bool, bool], Program] = {}

    def of(self, *, teacher_now: bool, teacher_next: bool) -> Program:
        """The program of a step that runs the teacher of this batch, of the next, both or none."""
        key = (teacher_now, teacher_next)
        if key not in self._known:
            schedule = build_schedule(
                self._schedule,
                self._pipeline,
                self._costs,
                teacher_now=teacher_now,
                teacher_next=teacher_next,
                split=self._split,
            )
            program = lower(schedule)
            validate(program)
            self._known[key] = program
        return self._known[key]
