"""One rank's part in training: what every engine holds, and may be asked between two steps.

The engine knows nothing of Lightning: ``strategy`` calls it from Lightning's hooks, tests call it
from threads. It is complete when it is made; by then the step is captured and its stages have been
given to the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import LOSS_RANK, Pipeline
from lightning_tspipe.networks.atoms import AtomChain
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.planning.placement import WHOLE, Placement
from lightning_tspipe.runtime.execution.executor import RankStages
from lightning_tspipe.runtime.execution.losses import Losses
from lightning_tspipe.runtime.execution.rank import Rank, TrainingMode
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.running import Execution, Run
from lightning_tspipe.runtime.stages.stage import Stage, StageStatistics
from lightning_tspipe.runtime.weights.materializing import Materializer
from lightning_tspipe.runtime.weights.ownership import Shards
from lightning_tspipe.runtime.weights.prediction import TeacherPrediction
from lightning_tspipe.runtime.weights.versions import StageWeights


class Engine(ABC):
    """One rank, with the stages that were placed on it.

    Args:
        here: This rank.
        captured: What :meth:`Rank.capture` found.
        placement: Who gets what.
        materializer: Where the values come from, of a module that has none; it stays spread.

    Attributes:
        pipeline: The stages and their ranks.
        whole: The placement of the networks as the module has them: a frozen part is of one.
        shards: Who owns which parameters.
        is_loss_rank: Whether this rank computes the loss of a chain, logs and saves.
        computes_loss: Whether it runs the step with a loss: that of a chain, or of its own stages.
        is_data_rank: Whether it reads the data.
        batch_size: Samples of the current step's largest call.
        teacher_ran_ahead: Whether the teacher of the current step ran in the step before.
        weights: The versions of this rank's weights; None if there is only one.
        prediction: Predicts a teacher that runs ahead; None: it is read as it is.
        lookahead: Up to how many batches behind the current one the data rank should give a step.

    Raises:
        PartitionError: The cuts separate a tied parameter.
    """

    def __init__(
        self,
        here: Rank,
        captured: Captured,
        placement: Placement,
        materializer: Materializer | None = None,
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
            network.check_cuts(self.whole.cuts[name])
        self.shards = Shards(self.module, captured, placement)
        if materializer is not None:
            materializer.fill(partial(self.shards.holds, rank=self.rank))
            self.shards.stays_spread = True
        self.shards.place(self.rank, self.device)
        self.is_loss_rank = self.rank == LOSS_RANK
        self.computes_loss = self.is_loss_rank
        if self.mode.apart is not None:
            self.computes_loss = self.rank in self.pipeline.loss_ranks
        self.is_data_rank = self.rank == placement.data_rank
        self.batch_size = 1
        self.teacher_ran_ahead = False
        self.weights: StageWeights | None = None
        self.prediction: TeacherPrediction | None = None
        self.lookahead = 0
        self._seed = here.seed
        self._index = 0

    @property
    def is_copy(self) -> bool:
        """Whether another rank holds the same stages, and speaks for them."""
        return False

    @property
    def outputs(self) -> list[Tensor]:
        """On the loss rank: what the step's calls gave so far, where gradients are wanted."""
        return []

    def prepare(
        self,
        captured: Captured,
        pipeline: Pipeline,
        mode: TrainingMode,
        recorder: Recorder,
        placement: Placement | None = None,
    ) -> Losses:
        """What runs a captured step on this rank: its losses, and stages that it holds.

        Args:
            captured: The step.
            pipeline: The stages and their ranks.
            mode: The way of training, or of evaluating.
            recorder: Notes when what ran.
            placement: Says how stages run; None: as they are.
        """
        stages = []
        for name, network in captured.networks.items():
            op = Op.FORWARD if name == "student" else Op.TEACHER
            blocks = {block: self.module.get_submodule(block) for block in network.block_names}
            # BatchNorm that is frozen counts nothing.
            statistics = DeferredStatistics(blocks.values() if network.called_as == name else ())
            run: Run | None = None
            if placement is not None:
                chain = AtomChain(network.atoms, network.wanted, self.here.compiler)
                again = placement.recomputed if op is Op.FORWARD else frozenset()
                pieces = WHOLE if op is Op.FORWARD else placement.pieces
                run = Execution(chain, blocks, statistics, again, pieces).run
            stages += [
                Stage(op, index, network, self.context, StageStatistics(statistics, index), run)
                for index, owner in enumerate(pipeline.layout(op).ranks)
                if owner == self.rank
            ]
        runner = StepRunner(
            self.module, self.names, captured.plan, is_loss_rank=self.computes_loss,
            beginning=mode.prologue,
        )  # fmt: skip
        own = RankStages(stages, self.transport, recorder)
        losses = Losses(captured.plan, runner, own, self.device)
        losses.handlers = mode.handlers(losses)
        own.handlers |= losses.handlers
        return losses

    @abstractmethod
    def backward(self, run_backward: Callable[[], None] | None, *, reduce: bool = True) -> None:
        """The part of a step after the loss.

        Args:
            run_backward: On a rank with a loss, the backward of the loss.
            reduce: Whether an update follows: gradients become those of all that train the same.
        """

    def suspended(self) -> AbstractContextManager[None]:
        """While inside, a replay that is running pauses: the networks are at hand."""
        return nullcontext()

    @abstractmethod
    def note_optimizer(self, started: float) -> None:
        """The optimizer step of this rank ended; one beside the losses belongs to their time."""

    def _note_optimizer(self, started: float, index: int) -> None:
        self.recorder.ran(index, Action(Op.OPTIMIZER, self.rank), started)

    # Between two steps

    @abstractmethod
    def predict_teacher(self) -> None:
        """From now on, teacher forwards that run ahead read predicted weights."""

    @abstractmethod
    def run_ahead(self, step: Step, batch: Any) -> None:
        """The teacher's calls of the coming step, now; every rank calls it before that step.

        Args:
            step: The step, a function of the batch.
            batch: The batch, on the data rank.
        """

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

    def resume(
        self,
        position: tuple[int, int],
        ahead: dict[str, Any] | None,
        in_flight: Sequence[dict[str, Any]] | None = None,
        teacher_before: dict[str, Any] | None = None,
    ) -> None:
        """Go on where another engine stopped; all ranks call it before their first step.

        Args:
            position: Its :attr:`position`.
            ahead: What :meth:`ahead` gave, with the statistics of all its ranks.
            in_flight: What :meth:`flights` gave on each of its ranks. With other stages or another
                policy, the forwards are done again.
            teacher_before: What its :class:`TeacherPrediction` knew, of all ranks.

        Raises:
            CaptureError: The step uses other values of the teacher than that engine's.
        """
        del ahead, in_flight, teacher_before
        self._seed, self._index = position

    @abstractmethod
    def drain(self) -> None:
        """Forget what ran ahead: the next batches are not those told of. Every rank calls it."""
