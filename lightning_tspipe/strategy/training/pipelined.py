"""What callbacks may ask of the pipeline: ``trainer.strategy.pipelined``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.profiling import flops_per_sample
from lightning_tspipe.runtime.batches.loading import isolated
from lightning_tspipe.runtime.weights.teacher_prediction import TeacherPrediction
from lightning_tspipe.simulation.timeline import Pause, Timeline
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.evaluating import Evaluator
from lightning_tspipe.strategy.training.head_logs import HeadsHere
from lightning_tspipe.strategy.training.repacking import Repacking

if TYPE_CHECKING:
    from lightning_tspipe.ir.pipeline import Pipeline
    from lightning_tspipe.runtime.execution.engine import Engine
    from lightning_tspipe.runtime.stages.frozen import Front
    from lightning_tspipe.runtime.stages.heads import FeatureCache

_DONE = "no more batches"


class Pipelined:
    """The pipeline, as callbacks see it.

    Args:
        run: The run.
        data: Its batches.
        evaluator: Runs steps of callbacks.
        heads: Those of a fan-out.
        repacking: Changes what is frozen.

    Attributes:
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

    def __init__(
        self, run: Run, data: Data, evaluator: Evaluator, heads: HeadsHere, repacking: Repacking
    ) -> None:
        self._run = run
        self._data = data
        self._evaluator = evaluator
        self._heads = heads
        self._repacking = repacking
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
        return self._data.seconds_reading

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
    def replica(self) -> int:
        """Which of the replicas this rank belongs to."""
        return self._run.replicas.index

    def of_first_replica(self, value: Any) -> Any:
        """What this rank's peer in the first replica has; every rank calls it."""
        return self._run.replicas.broadcast(value)

    @property
    def num_stages(self) -> int:
        """Stages of the student; 1 per rank before the first batch."""
        return len(self.student_stages) or self._run.num_ranks

    def freezes(self, *, repack: bool) -> None:
        """Layers will freeze, before the training loader is made; every rank calls it.

        Args:
            repack: Whether pipelines may become shorter, and have more replicas.
        """
        self._repacking.enable(repack=repack)

    def averages(self, originals: Mapping[str, str]) -> None:
        """Something averages parts of the student; before the strategy is set up.

        Args:
            originals: By the name of the submodule that is averaged into, the one that is averaged.
        """
        options = self._run.options
        self._run.options = replace(options, averages={**options.averages, **originals})

    def use_front(self, front: Front) -> None:
        """Have something asked what the frozen part returned for a sample before."""
        self._repacking.use_front(front)

    def use_features(self, cache: FeatureCache) -> None:
        """Have something asked what the trunk of heads returns for a sample; before a fit."""
        self._heads.cache = cache

    def look_at_trunk(self) -> None:
        """Features of a trunk that has changed are not read; every rank calls it."""
        engine = self._run.engine
        if engine is not None:
            engine.mode.begin_epoch(engine.transport, engine.pipeline)

    def freeze(
        self,
        names: Collection[str],
        mesh: tuple[int | None, int | None],
        told: Callable[[float], None],
    ) -> None:
        """Take frozen layers out of the pipeline, between two epochs; every rank calls it.

        Args:
            names: All parameters that are frozen now.
            mesh: Stages of what is trained, and ranks of a pipeline; None: as memory and time say.
            told: Called with the seconds that it took, when the next step is about to run.
        """
        self._repacking.freeze(frozenset(names), mesh, told)

    @property
    def student_names(self) -> tuple[str, ...]:
        """The submodules that are pipelined as the student."""
        return find_networks(self._run.module, self._run.options).student

    def gather(self, value: Any) -> list[Any] | None:
        """The values of this pipeline's ranks, on the loss rank; every rank calls it.

        Others send theirs and go on.
        """
        found: list[Any] | None = self._run.transport.gather_object(value, LOSS_RANK)
        return found

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
        network, cuts = engine.captured.held["student"], engine.cuts["student"]
        self.student_stages = tuple(
            tuple(name for atom in network.atoms[start:stop] for name in atom.parameter_names)
            for start, stop in pairwise(cuts)
        )
        self._pipeline = engine.pipeline
        if self.predicts_teacher:
            engine.predict_teacher()

    @property
    def delay(self) -> int:
        """How many updates the teacher is late in the steady state."""
        engine = self._run.engine
        if engine is not None and engine.mode.has_fixed_teacher:
            return 0
        return int(self._run.options.schedule == "tspipe")

    def evaluate(
        self,
        fn: Callable[[Any], Any],
        loader: Iterable[Any],
        *,
        limit: int | None = None,
    ) -> Iterator[Any]:
        """Run ``fn`` on every batch of a loader; every rank calls it.

        Args:
            fn: Calls pipelined submodules; its argument is a batch of the loader.
            loader: Read on the data rank only.
            limit: At most so many batches.

        Yields:
            What ``fn`` returns on the loss rank, None elsewhere.
        """
        key = object()
        try:
            for batch in self._batches(loader, limit):
                yield self._evaluator.evaluate_batch(fn, batch, key)
        finally:
            self._evaluator.forget(key)

    def _batches(self, loader: Iterable[Any], limit: int | None) -> Iterator[Any]:
        """The loader's batches on the data rank; as many placeholders elsewhere."""
        run, transport = self._run, self._run.transport
        if not run.is_data_rank:
            while transport.receive_object(run.data_rank) != _DONE:
                yield None
            return
        for batch in islice(isolated(loader), limit):
            self._tell("next")
            yield self._data.transfer(batch)
        self._tell(_DONE)

    def _tell(self, word: str) -> None:
        run = self._run
        for rank in range(run.num_ranks):
            if rank != run.pipeline_rank:
                run.transport.send_object(word, rank)

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
                self.recorder.stop()
                self.has_recording = True

    def timeline(self) -> Timeline | None:
        """The last recorded window of all ranks, on the loss rank; every rank calls it.

        The ranks exchange a window once. One that is not over yet ends here.
        """
        if self._steps_left > 0:
            self._steps_left = 0
            self.recorder.stop()
            self.has_recording = True
        if self.has_recording:
            self.has_recording = False
            self._gather()
        return self._timeline

    def _gather(self) -> None:
        transport, recorder = self._run.transport, self.recorder
        rank = transport.rank
        own = recorder.spans(rank), recorder.pauses(rank)
        gathered = transport.gather_object(own, LOSS_RANK)
        if gathered is None:
            return
        spans = [span for part, _ in gathered for span in part]
        if not spans:
            return
        start = min(span.start for span in spans)
        self._timeline = Timeline(
            tuple(replace(span, start=span.start - start, end=span.end - start) for span in spans),
            transport.num_ranks,
            self._pipeline,
            tuple(
                Pause(p.rank, p.reason, p.start - start, p.end - start)
                for _, part in gathered
                for p in part
            ),
        )
        self.bubble_ratio = self._timeline.bubble_ratio
