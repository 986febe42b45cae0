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

from lightning_tspipe.capture.plan import StepPlan
from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import LOSS_RANK, Pipeline
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.execution.lookahead import Ahead
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.stages.captured import Captured, Division
from lightning_tspipe.runtime.weights.materializing import Materializer
from lightning_tspipe.runtime.weights.ownership import Shards
from lightning_tspipe.runtime.weights.teacher_prediction import TeacherPrediction
from lightning_tspipe.runtime.weights.versions import StageWeights


class Engine(ABC):
    """One rank, with the stages that were placed on it.

    Args:
        here: This rank.
        captured: What :meth:`Rank.capture` found.
        placement: Who gets what.
        materializer: Where the values come from, of a module that has none; it stays spread.

    Attributes:
        cuts: For each network the first atom of each stage, and the number of atoms.
        pipeline: The stages and their ranks.
        whole: How the networks are divided as the module has them: a frozen part is of one.
        shards: Who owns which parameters.
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
        self.transport, self.device, self.context = here.transport, here.device, here.context
        self.recorder, self.mode = here.recorder, here.mode
        self.stop = here.stop
        self.rank = here.transport.rank
        self.captured = captured
        self.placement = placement
        self.materializer = materializer
        division = Division.of(captured, placement)
        self.cuts = division.cuts
        self.pipeline: Pipeline = self.mode.layout(captured, division)
        self.whole = self.mode.whole(division)
        for name, network in captured.whole.networks.items():
            network.check_cuts(self.whole.cuts[name])
        self.shards = Shards(
            self.module, captured.held, division.cuts, division.ranks, placement.holders
        )
        self.shards.follow(captured.followed)
        if materializer is not None:
            materializer.fill(partial(self.shards.holds, rank=self.rank))
            self.shards.stays_spread = True
        self.shards.place(self.rank, self.device)
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
    def is_loss_rank(self) -> bool:
        """Whether this rank computes the loss of a chain, logs and saves."""
        return self.rank == LOSS_RANK

    @property
    def computes_loss(self) -> bool:
        """Whether this rank runs the step with a loss: that of a chain, or of its own stages."""
        if self.mode.apart is None:
            return self.is_loss_rank
        return self.rank in self.pipeline.loss_ranks

    @property
    def is_data_rank(self) -> bool:
        """Whether this rank reads the data."""
        return self.rank == self.placement.data_rank

    @property
    def outputs(self) -> list[Tensor]:
        """On the loss rank: what the step's calls gave so far, where gradients are wanted."""
        return []

    def runner(self, plan: StepPlan, *, is_loss_rank: bool) -> StepRunner:
        """Runs a captured step on this rank.

        Args:
            plan: The step.
            is_loss_rank: Whether it replays the step.
        """
        return StepRunner(
            self.module, self.names, plan, is_loss_rank=is_loss_rank, beginning=self.mode.prologue
        )

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

    def ahead(self) -> Ahead | None:
        """What has run ahead of the next step, and is to be saved; None if nothing has."""
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
        ahead: Ahead | None,
        in_flight: Sequence[dict[str, Any]] | None = None,
        teacher_before: dict[str, Any] | None = None,
    ) -> None:
        """Go on where another engine stopped; all ranks call it before their first step.

        Args:
            position: Its :attr:`position`.
            ahead: What its loss rank knew to have run ahead, on all ranks.
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
