"""One rank: its way of training, what it has before stages are placed, and the engine it becomes.

A training mode is chosen once, where an engine is made: a chain's is here, and others are in
``modes``. Whoever has one asks it, and not which one it is.

The engine knows nothing of Lightning: ``strategy`` calls it from Lightning's hooks, tests call it
from threads. It is complete when it is made; by then the step is captured and its stages have been
given to the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import Inputs, NetworkName, StepPlan
from lightning_tspipe.capture.trace import Networks, Step, Tracer
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.heads.student import StudentFanout
from lightning_tspipe.ir.action import Op
from lightning_tspipe.ir.pipeline import LOSS_RANK, Coupling, NetworkLayout, Pipeline
from lightning_tspipe.moving import forget_graphs
from lightning_tspipe.planning.placement import WHOLE, Placement
from lightning_tspipe.replay.runner import StepRunner
from lightning_tspipe.runtime.batches.metadata import NOTHING_KNOWN, Known, StepHeader
from lightning_tspipe.runtime.execution.executor import Handler, Losses, Pace, RankStages
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.faults.stopping import Stop
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.batchnorm import DeferredStatistics
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.compiling import Compiler
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.stages.network import networks_of
from lightning_tspipe.runtime.stages.routes import RouteChain, Run
from lightning_tspipe.runtime.stages.stage import Execution, Stage
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.materializing import Materializer
from lightning_tspipe.runtime.weights.ownership import Follower, Shards, followed_tensors
from lightning_tspipe.runtime.weights.prediction import TeacherPrediction
from lightning_tspipe.runtime.weights.versions import StageWeights


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
        see: On the data rank: what is known of a batch whose networks' inputs were made.
        known: The same of the batches that were told of, by their numbers.
    """

    saves_lookahead: ClassVar[bool] = True
    _coupling: ClassVar[Coupling] = Coupling.CHAIN

    def __init__(self) -> None:
        self.beside: Mapping[NetworkName, Heads] = {}
        self.apart: StudentFanout | None = None
        self.rehearsing: Callable[[], AbstractContextManager[None]] = nullcontext
        self.prologue: Callable[[], AbstractContextManager[None]] = nullcontext
        self.see: Callable[[Any, Inputs], Known] = lambda *_: NOTHING_KNOWN
        self.known: dict[int, Known] = {}

    # What there is, and where it lies

    def layout(self, captured: Captured, placement: Placement) -> Pipeline:
        """The pipeline of a captured step."""
        layouts, num_units = captured.layouts(placement), placement.num_microbatches
        # An evaluation may call the teacher only.
        nothing = NetworkLayout(placement.student_ranks, 0, num_units, frozenset())
        student, teacher = layouts.get("student", nothing), layouts.get("teacher")
        data_rank, coupling = placement.data_rank, self._coupling
        return Pipeline(
            placement.num_ranks, student, teacher, data_rank, LOSS_RANK, coupling,
            is_fed=bool(captured.plan.fed_at),
        )  # fmt: skip

    def whole(self, placement: Placement) -> Placement:
        """The same for the networks as the module has them."""
        return placement

    @property
    def in_evaluation(self) -> TrainingMode:
        """The mode of forward-only steps on the same stages."""
        return TrainingMode()

    def handlers(self, losses: Losses) -> dict[Op, Handler]:
        """What runs the actions that are not those of stages."""
        return {Op.LOSS: losses.run, Op.PROLOGUE: losses.make_inputs}

    def reuses_inputs(self, plan: StepPlan) -> bool:  # noqa: ARG002
        """Whether what networks get of a batch is made once, although its step comes later."""
        return False

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
        followers: Copies of the module that lie as it does.
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
    followers: Sequence[Follower] = ()

    def capture(self, step: Step, batch: Any, *, training: bool = True) -> Captured:
        """Trace a step on its first batch; all ranks do it, with the same batch.

        Args:
            step: The step, a function of the batch.
            batch: The batch.
            training: Whether it takes part in a backward.

        Raises:
            CaptureError: The step can't be captured.
        """
        module, names = self.module, self.networks
        forget_graphs(module)  # before copies of attributes hold on to them
        tracer = Tracer(module, names, self.device)
        is_loss_rank = self.transport.rank == LOSS_RANK
        with self.mode.rehearsing(), nullcontext() if training else torch.no_grad():
            plan = tracer.trace(step, batch, self.seed)
            runner = StepRunner(module, names, plan, is_loss_rank=is_loss_rank)
            runner.late_effects(step, batch, self.seed, rehearsal=True)
        is_called = "teacher" in plan.routes
        needs_all = plan.has_ema and self.transport.num_ranks > 1 and not is_called
        followed = followed_tensors(module, names, needs_all=needs_all)
        networks = networks_of(module, plan, self.device, self.context, followed)
        if is_called:  # what of it the step reads lies where that is cut
            read = {name for atom in networks["teacher"].atoms for name in atom.tensor_names}
            followed = {copy: kept for copy, kept in followed.items() if copy not in read}
        return Captured(plan, networks, self.mode.beside, followed).at_rest

    def trace(self, step: Step, batch: Any) -> StepPlan:
        """What a later step of the training does, on the loss rank.

        Args:
            step: The step, a function of the batch.
            batch: A batch.

        Raises:
            CaptureError: It can't be captured.
        """
        with self.mode.rehearsing():
            return Tracer(self.module, self.networks, self.device).run(step, batch, 0).plan()


@dataclass(frozen=True)
class Stopped:
    """Where another engine stopped, and what it had in flight.

    Attributes:
        position: Its :attr:`Engine.position`.
        ahead: What :meth:`Engine.ahead` gave, with the statistics of all its ranks.
        in_flight: What :meth:`Engine.flights` gave on each of its ranks. With other stages or
            another policy, the forwards are done again.
        teacher_before: What its :class:`TeacherPrediction` knew, of all ranks.
    """

    position: tuple[int, int]
    ahead: dict[str, Any] | None = None
    in_flight: Sequence[dict[str, Any]] | None = None
    teacher_before: dict[str, Any] | None = None


class Engine(ABC):
    """One rank, with the stages that were placed on it.

    Args:
        here: This rank.
        captured: What :meth:`Rank.capture` found.
        placement: Who gets what.
        materializer: Where the values come from, of a module that has none; it stays spread.
        ties: Whether stages on several ranks may read one parameter.

    Attributes:
        pipeline: The stages and their ranks.
        whole: The placement of the networks as the module has them: a frozen part is of one.
        shards: Who owns which parameters.
        is_loss_rank: Whether this rank computes the loss of a chain, logs and saves.
        computes_loss: Whether it runs the step with a loss: that of a chain, or of its own stages.
        is_data_rank: Whether it reads the data.
        copies: The parameters that another rank holds too, and speaks for.
        batch_size: Samples of the current step's largest call.
        teacher_ran_ahead: Whether the teacher of the current step ran in the step before.
        weights: The versions of this rank's weights; None if there is only one.
        prediction: Predicts a teacher that runs ahead; None: it is read as it is.
        lookahead: Up to how many batches behind the current one the data rank should give a step.
        late: Tensors of the teacher by their names, as they were when it was kept from running
            ahead of the coming step; others have not changed. None: it was not kept.

    Raises:
        PartitionError: The cuts separate what has to be in one stage.
    """

    def __init__(
        self,
        here: Rank,
        captured: Captured,
        placement: Placement,
        materializer: Materializer | None = None,
        *,
        ties: bool = False,
    ) -> None:
        self.here = here
        self.module, self.names = here.module, here.networks
        self.device, self.context = here.device, here.context
        self.transport, self.stop = here.transport, here.stop
        self.recorder, self.mode = here.recorder, here.mode
        self.rank = here.transport.rank
        self.captured = captured
        self.placement = placement
        self.materializer = materializer
        self.pipeline: Pipeline = self.mode.layout(captured, placement)
        self.whole = self.mode.whole(placement)
        for name, network in captured.whole.networks.items():
            network.check_cuts(self.whole.cuts[name], ties=ties)
        self.shards = Shards(self.module, captured, placement, here.followers)
        for read in () if ties else self.shards.beside:
            raise PartitionError(
                f"a stage and the loss both read {read!r}, which schedule='1f1b' updates at "
                "different times. Use another schedule"
            )
        if materializer is not None:
            materializer.fill(partial(self.shards.holds, rank=self.rank))
            self.shards.stays_spread = True
        self.shards.place(self.rank, self.device)
        self.is_loss_rank = self.rank == LOSS_RANK
        self.computes_loss = self.rank in self.pipeline.loss_ranks
        self.is_data_rank = self.rank == placement.data_rank
        self.copies: set[nn.Parameter] = {
            own for own, ranks in self.shards.tied.values() if ranks[0] != self.rank
        }
        self.batch_size = 1
        self.teacher_ran_ahead = False
        self.weights: StageWeights | None = None
        self.prediction: TeacherPrediction | None = None
        self.lookahead = 0
        self.late: dict[str, Tensor] | None = None
        self._seed = here.seed
        self._index = 0

    def prepare(
        self, captured: Captured, pipeline: Pipeline, mode: TrainingMode, *, trains: bool = False
    ) -> Losses:
        """What runs a captured step on this rank: its losses, and stages that it holds.

        Args:
            captured: The step.
            pipeline: The stages and their ranks.
            mode: The way of training, or of evaluating.
            trains: Whether stages run as the placement says, and it is noted when what ran;
                otherwise they run as they are.
        """
        stages = []
        for name, network in captured.networks.items():
            op = Op.FORWARD if name == "student" else Op.TEACHER
            # BatchNorm that is frozen counts nothing.
            counting = network.blocks.values() if network.called_as == name else ()
            statistics = DeferredStatistics(counting)
            runs: dict[RouteChain, Run] = {}
            for way in network.routes if trains else ():
                run = partial(way.program.run, compiler=self.here.compiler)
                # In other modes it may read statistics that other calls have changed by then.
                is_repeatable = op is Op.FORWARD and not way.program.settings
                again = way.own(self.placement.recomputed) if is_repeatable else ()
                pieces = WHOLE if op is Op.FORWARD else self.placement.pieces
                runs[way] = Execution(run, network.blocks, statistics, again, pieces).run
            stages += [
                Stage(op, index, network, statistics, runs)
                for index, owner in enumerate(pipeline.layout(op).ranks)
                if owner == self.rank
            ]
        runner = StepRunner(
            self.module, self.names, captured.plan, is_loss_rank=self.computes_loss,
            beginning=mode.prologue,
        )  # fmt: skip
        runner.reads = captured.reads
        own = RankStages(stages, self.transport, self.recorder if trains else Recorder())
        losses = Losses(captured.plan, runner, own, self.device)
        losses.handlers = mode.handlers(losses)
        own.handlers |= losses.handlers
        return losses

    def share_header(self, describe: Callable[[], StepHeader]) -> StepHeader:
        """What the data rank says of a batch that all ranks begin with; they heed its word.

        Args:
            describe: On the data rank, makes of the batch what networks get, and describes both.
        """
        own = describe() if self.is_data_rank else None
        with waiting("the start of a step"):
            header = self.transport.broadcast_object(own, self.placement.data_rank)
        assert isinstance(header, StepHeader), f"expected the header of a step, got {header!r}"
        self.stop.hear(header.stop)
        return header

    @abstractmethod
    def backward(self, run_backward: Callable[[], None] | None, *, reduce: bool = True) -> None:
        """The part of a step after the loss.

        Args:
            run_backward: On a rank with a loss, the backward of the loss.
            reduce: Whether an update follows: gradients become those of all that train the same.
        """

    @abstractmethod
    def note_optimizer(self, started: float) -> None:
        """The optimizer step of this rank ended; one beside the losses belongs to their time."""

    # Between two steps

    def predict_teacher(self) -> None:  # noqa: B027 - where nothing runs ahead there are none
        """From now on, teacher forwards that run ahead read predicted weights."""

    def run_ahead(self, step: Step, batch: Any) -> None:  # noqa: B027 - as above
        """The teacher's calls of the coming step, now; every rank calls it before that step.

        Args:
            step: The step, a function of the batch.
            batch: The batch, on the data rank.
        """

    def lacks_late_teacher(self, updates: int) -> bool:  # noqa: ARG002
        """Whether a teacher that is late in whole windows has not run ahead of this one.

        Args:
            updates: How many the weights of this window have.
        """
        return False

    @property
    def gradients_are_partial(self) -> bool:
        """Whether backwards of the last batches go on in the next steps."""
        return False

    @property
    def position(self) -> tuple[int, int]:
        """The seed of the steps' random streams, and the number of the next step."""
        return self._seed, self._index

    def ahead(self) -> dict[str, Any] | None:
        """What a teacher has run ahead of the next step, to be saved; None if nothing has.

        Plain values: the sizes of the calls' batches; on the loss rank, what the step uses of each
        call; and what this rank's BatchNorm layers will move towards, by call and name.
        """
        return None

    def flights(self) -> dict[str, Any] | None:
        """This rank's batches in flight, to be saved; None if there are none.

        Every rank calls it, and one that goes on from them has to have the same stages.
        """
        return None

    @abstractmethod
    def settle(self, *, keeps_flights: bool = False) -> None:
        """Before anything is saved; every rank calls it.

        Args:
            keeps_flights: Whether forwards of the student that ran ahead are saved too. Otherwise
                they are forgotten, and done again: what is saved, and what goes on, is a pipeline
                that is about to be filled.
        """

    def resume(self, stopped: Stopped) -> None:
        """Go on where another engine stopped; all ranks call it before their first step.

        Raises:
            CaptureError: The step uses other values of the teacher than that engine's.
        """
        self._seed, self._index = stopped.position

    @abstractmethod
    def drain(self) -> None:
        """Forget what ran ahead: the next batches are not those told of. Every rank calls it."""
