"""One rank before anything is placed: the module, the other ranks, and the way of training.

A training mode is chosen once, where an engine is made: a chain's is here, and others are in
``modes``. Whoever has one asks it, and not which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import NetworkName, StepPlan
from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Networks, Step, Tracer
from lightning_tspipe.heads.student import StudentFanout
from lightning_tspipe.ir.action import Op
from lightning_tspipe.ir.pipeline import LOSS_RANK, Coupling, NetworkLayout, Pipeline
from lightning_tspipe.networks.compiling import Compiler
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.batches.metadata import NOTHING_KNOWN, Known, StepHeader
from lightning_tspipe.runtime.execution.executor import Handler, Losses, Pace
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.ownership import followed_tensors, forget_graphs


class TrainingMode:
    """A way of training: networks, placement, handlers, losses, and what happens between steps.

    This one is a chain: a student, and perhaps a teacher beside it, whose outputs one loss on one
    rank reads. Others say what differs from it.

    Attributes:
        saves_lookahead: Whether checkpoints hold what has run ahead; otherwise it runs again.
        beside: What is divided among the ranks, and does not go through the pipeline.
        rehearsing: Around the trace of a step.
        prologue: Around the part of a step that makes what the networks get.
        apart: What ranks train apart, each in steps of its own, behind a teacher that never
            changes; None: all steps are the loss rank's.
    """

    saves_lookahead: ClassVar[bool] = True
    _coupling: ClassVar[Coupling] = Coupling.CHAIN

    def __init__(self) -> None:
        self.beside: Mapping[NetworkName, Heads] = {}
        self.apart: StudentFanout | None = None
        self.rehearsing: Callable[[], AbstractContextManager[None]] = nullcontext
        self.prologue: Callable[[], AbstractContextManager[None]] = nullcontext

    # What there is, and where it lies

    def layout(self, captured: Captured, placement: Placement) -> Pipeline:
        """The pipeline of a captured step."""
        layouts, num_units = captured.layouts(placement), placement.num_microbatches
        # An evaluation may call the teacher only.
        nothing = NetworkLayout(placement.student_ranks, 0, num_units, frozenset())
        student, teacher = layouts.get("student", nothing), layouts.get("teacher")
        data_rank, coupling = placement.data_rank, self._coupling
        return Pipeline(placement.num_ranks, student, teacher, data_rank, LOSS_RANK, coupling)

    def whole(self, placement: Placement) -> Placement:
        """The same for the networks as the module has them."""
        return placement

    @property
    def in_evaluation(self) -> TrainingMode:
        """The mode of forward-only steps on the same stages."""
        return TrainingMode()

    def handlers(self, losses: Losses) -> dict[Op, Handler]:
        """What runs the actions that are not those of stages."""
        return {Op.LOSS: losses.run}

    def reuses_inputs(self, plan: StepPlan) -> bool:  # noqa: ARG002
        """Whether what networks get of a batch is made once, although its step comes later."""
        return False

    # What is known of a batch before it runs

    def see(self, batch: Any, inputs: Sequence[Tensor]) -> Known:  # noqa: ARG002
        """On the data rank: what is known of a batch whose networks' inputs were made."""
        return NOTHING_KNOWN

    def expect(self, headers: Mapping[int, StepHeader]) -> None:
        """The batches, by their numbers, that a step has to do with."""

    # What happens between steps

    def begin(self, rank: int, pipeline: Pipeline) -> None:
        """A rank has its stages."""

    def begin_epoch(self, transport: Transport, pipeline: Pipeline) -> None:
        """All ranks have their stages, or begin an epoch; every rank calls it."""

    def end(self) -> None:
        """The training is over; whoever asks now means the whole module."""

    def pace(self, transport: Transport, pipeline: Pipeline, placement: Placement) -> Pace | None:  # noqa: ARG002
        """What bounds how far ranks run ahead of each other, if their steps don't."""
        return None


@dataclass(frozen=True)
class Rank:
    """What one rank has, whatever lies on it.

    Attributes:
        module: The module that has the networks.
        networks: Their names.
        transport: How to reach the other ranks.
        device: Where this rank computes.
        mode: The way of training.
        seed: Seed of the steps' random streams, the same on all ranks.
        context: The precision plugin's forward context.
        replicas: The other pipelines that train the same networks on other batches.
        compiler: Compiles what stages run.
        stop: Whether the ranks were asked to stop.
        recorder: Notes what this rank does when.
    """

    module: nn.Module
    networks: Networks
    transport: Transport
    device: torch.device
    mode: TrainingMode = field(default_factory=TrainingMode)
    seed: int = 0
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    replicas: Replicas = field(default_factory=Replicas)
    compiler: Compiler | None = None
    stop: Stop = field(default_factory=Stop)
    recorder: Recorder = field(default_factory=Recorder)

    def capture(self, step: Step, batch: Any, *, training: bool = True) -> Captured:
        """Trace a step on its first batch; all ranks do it, with the same batch.

        Args:
            step: The step, a function of the batch.
            batch: The batch.
            training: Whether it takes part in a backward; without one, it may call parts of the
                networks too.

        Raises:
            CaptureError: The step can't be captured.
        """
        module, names = self.module, self.networks
        forget_graphs(module)  # before copies of attributes hold on to them
        tracer = Tracer(module, names, self.device, parts=not training)
        is_loss_rank = self.transport.rank == LOSS_RANK
        with self.mode.rehearsing(), nullcontext() if training else torch.no_grad():
            plan = tracer.trace(step, batch, self.seed)
            runner = StepRunner(module, names, plan, is_loss_rank=is_loss_rank)
            runner.late_effects(step, batch, self.seed, rehearsal=True)
        networks = {
            name: ChainNetwork.of(name, module, plan, self.device, self.context)
            for name in plan.chains
        }
        followed: dict[str, str] = {}
        if "teacher" not in networks:
            needs_all = plan.has_ema and self.transport.num_ranks > 1
            followed = followed_tensors(module, names, needs_all=needs_all)
        return Captured(plan, networks, self.mode.beside, followed)
