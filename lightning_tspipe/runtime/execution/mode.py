"""The interface of training modes: abstract here, and one final class each in ``modes``.

A mode is chosen once, where an engine is made. Whoever has one asks it, and not which one it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor

from lightning_tspipe.capture.plan import NetworkName, StepPlan
from lightning_tspipe.heads.student import StudentFanout
from lightning_tspipe.ir.action import Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.batches.metadata import Known, StepHeader
from lightning_tspipe.runtime.execution.executor import Handler
from lightning_tspipe.runtime.execution.losses import Losses
from lightning_tspipe.runtime.execution.pace import Pace
from lightning_tspipe.runtime.stages.captured import Captured, Division, Held
from lightning_tspipe.runtime.transport.base import Transport


class TrainingMode(ABC):
    """A way of training: networks, placement, handlers, losses, and what happens between steps.

    Attributes:
        has_fixed_teacher: Whether the teacher never changes, so that it can't be late.
        saves_lookahead: Whether checkpoints hold what has run ahead; otherwise it runs again.
    """

    has_fixed_teacher: ClassVar[bool]
    saves_lookahead: ClassVar[bool]

    # What there is, and where it lies

    @property
    @abstractmethod
    def beside(self) -> Mapping[NetworkName, Held]:
        """What is divided among the ranks, and does not go through the pipeline."""

    @abstractmethod
    def layout(self, captured: Captured, division: Division) -> Pipeline:
        """The pipeline of a captured step; the last rank reads the data."""

    @abstractmethod
    def whole(self, division: Division) -> Division:
        """The same for the networks as the module has them."""

    @property
    @abstractmethod
    def in_evaluation(self) -> TrainingMode:
        """The mode of forward-only steps on the same stages."""

    @abstractmethod
    def forwards(self, pipeline: Pipeline) -> Schedule:
        """The order of a step of which only the forwards will run."""

    @property
    @abstractmethod
    def apart(self) -> StudentFanout | None:
        """What ranks train apart, each in steps of its own; None: all steps are the loss rank's."""

    # What runs

    @abstractmethod
    def rehearsing(self) -> AbstractContextManager[None]:
        """Around the trace of a step."""

    @abstractmethod
    def prologue(self) -> AbstractContextManager[None]:
        """Around the part of a step that makes what the networks get."""

    @abstractmethod
    def handlers(self, losses: Losses) -> dict[Op, Handler]:
        """What runs the actions that are not those of stages."""

    @abstractmethod
    def reuses_inputs(self, plan: StepPlan) -> bool:
        """Whether what networks get of a batch is made once, although its step comes later."""

    # What is known of a batch before it runs

    @abstractmethod
    def see(self, batch: Any, inputs: Sequence[Tensor]) -> Known:
        """On the data rank: what is known of a batch whose networks' inputs were made."""

    @abstractmethod
    def expect(self, headers: Mapping[int, StepHeader]) -> None:
        """The batches, by their numbers, that a step has to do with."""

    # What happens between steps

    @abstractmethod
    def begin(self, rank: int, pipeline: Pipeline) -> None:
        """A rank has its stages."""

    @abstractmethod
    def begin_epoch(self, transport: Transport, pipeline: Pipeline) -> None:
        """All ranks have their stages, or begin an epoch; every rank calls it."""

    @abstractmethod
    def end(self) -> None:
        """The training is over; whoever asks now means the whole module."""

    @abstractmethod
    def pace(self, transport: Transport, pipeline: Pipeline, placement: Placement) -> Pace | None:
        """What bounds how far ranks run ahead of each other, if their steps don't."""
