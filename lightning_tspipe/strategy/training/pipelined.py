"""What callbacks may ask of the pipeline: ``trainer.strategy.pipelined``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

from lightning_tspipe.ir.pipeline import LOSS_RANK, Pipeline
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.profiling.steps import flops_per_sample
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.stages.frozen import Front
from lightning_tspipe.runtime.stages.heads import FeatureCache
from lightning_tspipe.runtime.weights.prediction import TeacherPrediction
from lightning_tspipe.simulation.timeline import Timeline
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.training.evaluating import Evaluator
from lightning_tspipe.strategy.training.repacking import Repacking


class Pipelined:
    """The pipeline, as callbacks see it.

    Args:
        run: The run.
        evaluator: Runs steps of callbacks.
        repacking: Changes what is frozen.

    Attributes:
        evaluate: Runs a function on every batch of a loader, as ``Evaluator.evaluate``.
        freezes: Says that layers will freeze, as ``Repacking.enable``.
        freeze: Takes them out of the pipeline, as ``Repacking.freeze``.
        bubble_ratio: Share of the ranks' time without work in the last recorded window; None
            before the first.
        batch_size: Samples of the current batch, over all its views the largest; on every rank.
        teacher_ran_ahead: Whether the teacher of the current batch ran in the step before; None
            without a teacher.
        student_stages: For each stage of the student, the names of its parameters.
        recorder: Notes what this rank does while a window is recorded.
        predicts_teacher: Whether what runs ahead reads the teacher as it is expected one update
            later.
        has_recording: Whether a window is over that :meth:`timeline` was not yet asked for; the
            same on all ranks.
    """

    def __init__(self, run: Run, evaluator: Evaluator, repacking: Repacking) -> None:
        self._run = run
        self.freezes, self.freeze = repacking.enable, repacking.freeze
        self.evaluate = evaluator.evaluate
        self._steps_left = 0
        self._pipeline: Pipeline | None = None
        self._timeline: Timeline | None = None
        self.recorder = run.recorder
        self.has_recording = False
        self.bubble_ratio: float | None = None
        self.batch_size = 1
        self.teacher_ran_ahead: bool | None = None
        self.predicts_teacher = False
        self.student_stages: tuple[tuple[str, ...], ...] = ()

    @property
    def seconds_reading(self) -> float:
        """How long this rank has read training batches, in all."""
        return self._run.seconds_reading

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank computes losses and logs."""
        return self._run.is_loss_rank

    @property
    def decides_by_times(self) -> bool:
        """Whether decisions may follow measured times, so that another run may decide otherwise."""
        return not self._run.options.plans_by_flops

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the pipeline."""
        return self._run.num_replicas

    @property
    def num_ranks(self) -> int:
        """Devices of this pipeline."""
        return self._run.num_ranks

    @property
    def data_rank(self) -> int:
        """The rank of this pipeline that reads the data."""
        return self._run.data_rank

    @property
    def is_data_rank(self) -> bool:
        """Whether this rank reads the data of its pipeline."""
        return self._run.is_data_rank

    @property
    def replica(self) -> int:
        """Which of the replicas this rank belongs to."""
        return self._run.replicas.index

    def of_replicas(self, value: Any) -> list[Any]:
        """The values of this rank's peers in all replicas, on each of them; all of them call it."""
        return self._run.replicas.gather(value)

    @property
    def plan(self) -> Plan | None:
        """The planner's result; None before the first batch, and where nothing was searched."""
        now = self._run.resumption.now
        return None if now is None else now.plan

    @property
    def table(self) -> str:
        """What is pipelined, for people; "" before the first batch."""
        now = self._run.resumption.now
        return self._run.table or ("" if now is None else now.table)

    @property
    def num_stages(self) -> int:
        """Stages of the student; 1 per rank before the first batch."""
        return len(self.student_stages) or self._run.num_ranks

    def averages(self, originals: Mapping[str, str]) -> None:
        """Something averages parts of the student; before the strategy is set up.

        Args:
            originals: By the name of the submodule that is averaged into, the one that is averaged.
        """
        options = self._run.options
        self._run.options = replace(options, averages={**options.averages, **originals})

    def use_front(self, front: Front) -> None:
        """Have something asked what the frozen part returned for a sample before."""
        self._run.freezing.front = front

    def use_features(self, cache: FeatureCache) -> None:
        """Have something asked what the trunk of heads returns for a sample; before a fit."""
        self._run.features = cache

    def look_at_trunk(self) -> None:
        """Features of a trunk that has changed are not read; every rank calls it."""
        engine = self._run.engine
        if engine is not None:
            engine.mode.begin_epoch(engine.transport, engine.pipeline)

    @property
    def student_names(self) -> tuple[str, ...]:
        """The submodules that are pipelined as the student."""
        return self._run.networks.student

    def gather(self, value: Any) -> list[Any] | None:
        """The values of this pipeline's ranks, on the loss rank; every rank calls it.

        Others send theirs and go on.
        """
        return self._run.transport.gather_object(value, LOSS_RANK)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Of each of some numbers, the sum over all ranks of all replicas; every rank calls it."""
        transport, replicas = self._run.transport, self._run.replicas
        parts: Any = transport.gather_object(list(values), LOSS_RANK)
        if parts is not None:
            own = [sum(column) for column in zip(*parts, strict=True)]
            parts = [sum(column) for column in zip(*replicas.gather(own), strict=True)]
        found: list[float] = transport.broadcast_object(parts, LOSS_RANK)
        return found

    @property
    def teacher_prediction(self) -> TeacherPrediction | None:
        """What predicts this rank's part of the teacher; None before the first batch."""
        engine = self._run.engine
        return None if engine is None else engine.prediction

    def flops_per_sample(self) -> float:
        """Floating-point operations of one sample in a training step: products and convolutions.

        Counted on shapes, on the rank that asks; 0 before the first batch.
        """
        engine = self._run.engine
        return 0.0 if engine is None else flops_per_sample(engine.captured)

    def stepped(self, engine: Engine) -> None:
        """A training step has run, up to its loss."""
        self.batch_size = engine.batch_size
        has_teacher = engine.pipeline.teacher is not None
        self.teacher_ran_ahead = engine.teacher_ran_ahead if has_teacher else None

    def placed(self, engine: Engine) -> None:
        """The first batch has been seen: every rank has its stages."""
        names = [atom.parameter_names for atom in engine.captured.held["student"].atoms]
        self.student_stages = tuple(
            tuple(chain(*names[start:stop]))
            for start, stop in pairwise(engine.placement.student_cuts)
        )
        self._pipeline = engine.pipeline
        if self.predicts_teacher:
            engine.predict_teacher()

    @property
    def delay(self) -> int:
        """How many updates the teacher is late in the steady state."""
        engine = self._run.engine
        if engine is not None and engine.mode.apart is not None:
            return 0
        return int(self._run.options.schedule == "tspipe")

    def record(self, num_steps: int) -> None:
        """Record what this rank does in the next steps."""
        self.recorder.start()
        self._steps_left = num_steps
        self.has_recording = False

    def step_done(self) -> None:
        """An optimizer step ended."""
        if self._steps_left > 0:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._end_recording()

    def _end_recording(self) -> None:
        self._steps_left = 0
        self.recorder.stop()
        self.has_recording = True

    def timeline(self) -> Timeline | None:
        """The last recorded window of all ranks, on the loss rank; every rank calls it.

        The ranks exchange a window once. One that is not over yet ends here.
        """
        if self._steps_left > 0:
            self._end_recording()
        transport, recorder = self._run.transport, self.recorder
        gathered: Any = None
        if self.has_recording:
            self.has_recording, rank = False, transport.rank
            own = recorder.spans(rank), recorder.pauses(rank)
            gathered = transport.gather_object(own, LOSS_RANK)
        spans, pauses = ([x for part in gathered or () for x in part[kind]] for kind in (0, 1))
        if spans:
            start = min(span.start for span in spans)

            def shifted(each: Any) -> Any:
                return replace(each, start=each.start - start, end=each.end - start)

            self._timeline = Timeline(
                tuple(map(shifted, spans)),
                transport.num_ranks,
                self._pipeline,
                tuple(map(shifted, pauses)),
            )
            self.bubble_ratio = self._timeline.bubble_ratio
        return self._timeline
