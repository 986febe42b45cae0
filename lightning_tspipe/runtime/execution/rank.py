"""What one rank holds: the traced networks, this rank's stages of them, and what runs those.

Nothing here runs a step; that is the engine's part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_tspipe.capture.plan import NetworkName, StepPlan, TensorSpec
from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Networks, Step, Tracer
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.networks.compiling import Compiler
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.batches.announcements import Announcements
from lightning_tspipe.runtime.batches.metadata import StepHeader
from lightning_tspipe.runtime.execution.executor import Executor
from lightning_tspipe.runtime.execution.lookahead import Lookahead
from lightning_tspipe.runtime.execution.pace import Pace
from lightning_tspipe.runtime.execution.programs import Programs
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.stages.captured import Captured, layout
from lightning_tspipe.runtime.stages.frozen import Front, FrozenPart
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.stages.running import Execution, InPieces
from lightning_tspipe.runtime.stages.units import StepUnits
from lightning_tspipe.runtime.transport.base import Receipt, Transport
from lightning_tspipe.runtime.transport.channels import (
    Channel,
    Edge,
    Lane,
    edges_from,
    program_edges,
)
from lightning_tspipe.runtime.transport.reduction import GradientReduction
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.averages import followed_tensors
from lightning_tspipe.runtime.weights.materializing import Materializer
from lightning_tspipe.runtime.weights.ownership import Shards, forget_graphs
from lightning_tspipe.runtime.weights.policies import WeightPolicy
from lightning_tspipe.runtime.weights.versions import StageWeights, stage_weights
from lightning_tspipe.simulation.cost import CostTable


class Rank:
    """One rank of a pipeline, and what is placed on it.

    Args:
        module: The module that has the networks.
        networks: Their names.
        transport: How to reach the other ranks.
        device: Where this rank computes.
        seed: Seed of the steps' random streams, the same on all ranks.
        forward_context: The precision plugin's forward context.
        replicas: The other pipelines that train the same networks on other batches.
        compiler: Compiles what stages run.
        heads: The student, if its stages are heads.

    Attributes:
        stop: Whether the ranks were asked to stop.
        pace: With heads, how far ahead of others this rank may run.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank
        self,
        module: nn.Module,
        networks: Networks,
        transport: Transport,
        device: torch.device,
        seed: int = 0,
        forward_context: Callable[[], AbstractContextManager[None]] = nullcontext,
        replicas: Replicas | None = None,
        compiler: Compiler | None = None,
        heads: Heads | None = None,
    ) -> None:
        self.module = module
        self.transport = transport
        self.rank = transport.rank
        self.names = networks
        self.device = device
        self.context = forward_context
        self._replicas = replicas or Replicas()
        self._reduction: GradientReduction | None = None
        self.compiler = compiler
        self.heads = heads
        self.materializer: Materializer | None = None
        self.pace: Pace | None = None
        self.stop = Stop()
        self._seed = seed
        self._known_units: dict[tuple[tuple[TensorSpec, ...], int], StepUnits] = {}

    @property
    def is_copy(self) -> bool:
        """Whether another rank holds the same stages, and speaks for them."""
        return False

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank computes the loss."""
        return self.rank == LOSS_RANK

    @property
    def computes_loss(self) -> bool:
        """Whether this rank computes a loss: of all, or of its own heads."""
        return self.is_loss_rank if self.heads is None else self.rank in self.pipeline.loss_ranks

    @property
    def is_data_rank(self) -> bool:
        """Whether this rank reads the data."""
        return self.rank == self.placement.data_rank

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
        forget_graphs(self.module)  # before copies of attributes hold on to them
        tracer = Tracer(self.module, self.names, self.device, parts=not training)
        rehearsing = nullcontext() if self.heads is None else self.heads.rehearsing()
        with rehearsing, nullcontext() if training else torch.no_grad():
            plan = tracer.trace(step, batch, self._seed)
            runner = StepRunner(self.module, self.names, plan, is_loss_rank=self.is_loss_rank)
            runner.late_effects(step, batch, self._seed, rehearsal=True)
        networks = {
            name: ChainNetwork(name, self.module, plan, self.device) for name in plan.chains
        }
        followed: dict[str, str] = {}
        if "teacher" not in networks:
            needs_all = plan.has_ema and self.transport.num_ranks > 1
            followed = followed_tensors(self.module, self.names, needs_all=needs_all)
        return Captured(plan, networks, self.heads, followed)

    def runner(self, plan: StepPlan) -> StepRunner:
        """Runs a captured step on this rank, which is placed."""
        beginning = nullcontext if self.heads is None else self.heads.beginning
        return StepRunner(
            self.module, self.names, plan, is_loss_rank=self.computes_loss, beginning=beginning
        )

    def place(  # noqa: PLR0913, PLR0917 - everything that decides who does what
        self,
        captured: Captured,
        placement: Placement,
        schedule: str,
        costs: CostTable | None,
        materializer: Materializer | None = None,
        weights: WeightPolicy | None = None,
    ) -> None:
        """Cut the networks, keep this rank's stages, and build the schedules.

        Args:
            captured: What :meth:`capture` found.
            placement: Who gets what.
            schedule: ``tspipe``, ``gpipe``, ``sequential`` or ``1f1b``.
            costs: Costs of the stages, for the order of actions; None for equal ones.
            materializer: Where the values come from, of a module that has none; it stays spread.
            weights: Which version of the weights is read, with ``1f1b``.

        Raises:
            PartitionError: The cuts separate a tied parameter.
        """
        self.captured = captured
        self.placement = placement
        plan, networks = captured.plan, captured.networks
        self.cuts: dict[NetworkName, tuple[int, ...]] = {"student": placement.student_cuts}
        self.ranks: dict[NetworkName, tuple[int, ...]] = {"student": placement.student_ranks}
        if "teacher" in networks:
            self.cuts["teacher"] = placement.teacher_cuts
            self.ranks["teacher"] = placement.teacher_ranks
        for name, network in captured.whole.networks.items():
            network.check_cuts(self.whole_cuts[name])
        self.pipeline = layout(
            captured, self.ranks, self.cuts, placement.num_microbatches, self.transport.num_ranks
        )
        self._programs = Programs(self.pipeline, schedule, costs, placement.split, placement.depth)
        self.announcements = Announcements(
            self.transport, placement.data_rank, self._hear_word, self._ask_early
        )
        self.transport.open(self._edges(plan))
        self.shards = Shards(self.module, captured.held, self.cuts, self.ranks, placement.holders)
        self.shards.follow(captured.followed)
        self.materializer = materializer
        if materializer is not None:
            materializer.fill(partial(self.shards.holds, rank=self.rank))
            self.shards.stays_spread = True
        self.shards.place(self.rank, self.device)
        if self._replicas.number > 1:
            trained = self.shards.by_stage(self.rank)
            self._reduction = GradientReduction(trained, self._replicas.peers)
        self._runner = self.runner(plan)
        statistics = {
            name: DeferredStatistics(
                [self.module.get_submodule(block) for block in network.block_names]
                if network.called_as == name
                else []  # BatchNorm that is frozen counts nothing
            )
            for name, network in networks.items()
        }
        self.executor = Executor(
            self.transport,
            networks,
            statistics,
            self.context,
            self.device,
            self._executions(networks, statistics),
        )
        if weights is not None:
            self.executor.weights = stage_weights(
                weights, self.rank, self.transport.num_ranks, self.module, self._trained_names()
            )
        # Between two steps, as in a checkpoint, no rank may wait for what another one asks for in
        # a later step.
        self.transport.steps_under_way = max(1, self._programs.steps_early)
        if captured.heads is not None and not self.transport.is_tight:
            slack = max(1, placement.depth + 1 - len(placement.teacher_ranks))
            self.pace = Pace(self.transport, self.pipeline, slack)
            self.transport.steps_under_way = max(self.transport.steps_under_way, slack + 1)
        self._lookahead = Lookahead(
            self.module, plan, self.executor, is_loss_rank=self.is_loss_rank,
            is_frozen=captured.is_frozen,
        )  # fmt: skip

    def _edges(self, plan: StepPlan) -> set[Edge]:
        """The edges that this pipeline's steps use."""
        found = program_edges(self._programs.fullest)
        if plan.batch_fields:
            data_rank = self.placement.data_rank
            found |= edges_from(data_rank, self.pipeline.loss_ranks, Lane.EARLY_FIELDS)
        return found

    @property
    def _front(self) -> Front | None:
        """What knows the frozen part's outputs."""
        part = self.captured.networks.get("teacher")
        return part.front if isinstance(part, FrozenPart) else None

    @property
    def whole_cuts(self) -> dict[NetworkName, tuple[int, ...]]:
        """The cuts of the whole networks: of a student, those of its frozen part come first."""
        if not self.captured.is_frozen:
            return self.cuts
        return {"student": (*self.cuts["teacher"], *self.cuts["student"][1:])}

    @property
    def whole_ranks(self) -> dict[NetworkName, tuple[int, ...]]:
        """The rank of each of their stages."""
        if not self.captured.is_frozen:
            return self.ranks
        return {"student": (*self.ranks["teacher"], *self.ranks["student"])}

    def _trained_names(self) -> list[str]:
        """Of this rank's stages of the student, the parameters that are trained."""
        atoms, cuts = self.captured.networks["student"].atoms, self.cuts["student"]
        own = [atom for stage in self.pipeline.stages_of(self.rank)
               for atom in atoms[cuts[stage] : cuts[stage + 1]]]  # fmt: skip
        names = dict.fromkeys(name for atom in own for name in atom.parameter_names)
        return [name for name in names if self.module.get_parameter(name).requires_grad]

    @property
    def weights(self) -> StageWeights | None:
        """The versions of this rank's weights; None if there is only one."""
        return self.executor.weights

    def _executions(
        self,
        networks: dict[NetworkName, ChainNetwork],
        statistics: dict[NetworkName, DeferredStatistics],
    ) -> dict[NetworkName, Execution | InPieces]:
        """How the networks' atoms run, where not simply as they are."""
        again = {"student": self.placement.recomputed}
        found: dict[NetworkName, Execution | InPieces] = {
            name: Execution(
                network.compiled_chain(self.compiler),
                {block: self.module.get_submodule(block) for block in network.block_names},
                statistics[name],
                again.get(name, ()),
            )
            for name, network in networks.items()
            if self.compiler is not None or again.get(name)
        }
        if self.placement.pieces.num_atoms:
            whole = found.get("teacher") or networks["teacher"].chain
            found["teacher"] = InPieces(whole.run, self.placement.pieces)
        return found

    @property
    def lookahead(self) -> int:
        """Up to how many batches behind the current one the data rank should give a step."""
        return self._programs.announced

    def _hear_word(self, word: str) -> None:
        self.stop.hear(word)

    def _ask_early(self, header: StepHeader) -> Receipt | None:
        """On the loss rank: the fields of a batch, if they travel with its description."""
        if not self.computes_loss or not self._programs.tells_early:
            return None
        fields, data_rank = self.captured.plan.batch_fields, self.placement.data_rank
        return header.ask_for_fields(fields, self.transport, data_rank, Channel.EARLY_FIELDS)

    def _units(self, header: StepHeader) -> StepUnits:
        known = 0 if header.samples is None else header.samples.known
        key = (header.inputs, known)
        if key not in self._known_units:
            self._known_units[key] = StepUnits(
                self.captured.plan,
                self.captured.networks,
                self.cuts,
                self.placement.num_microbatches,
                header.inputs,
                self.context,
                known,
            )
        return self._known_units[key]
