"""Run validation, test and prediction steps through the pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from lightning_tspipe.errors import (
    CaptureError,
    ConfigurationError,
    NoCallError,
    PartitionError,
)
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.random_states import RandomStates
from lightning_tspipe.runtime.batches.loading import isolated
from lightning_tspipe.runtime.execution.evaluation import Evaluation
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.weights.materializing import is_on_meta
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.refusals import refuse
from lightning_tspipe.strategy.training.data import Data, on_cpu, to_device
from lightning_tspipe.strategy.training.module_weights import ModuleWeights, share_weights
from lightning_tspipe.strategy.training.placing import set_up
from lightning_tspipe.strategy.training.step_results import StepResults
from lightning_tspipe.strategy.training.summary import summarize

log = logging.getLogger("lightning_tspipe")


class Evaluator:
    """Runs steps without a backward.

    In a training the stages are there. Otherwise they are made at the first batch, for as long as
    the evaluation lasts; a step that can't be captured runs on the loss rank alone.

    Args:
        run: The run.
        data: Its batches.
        weights: Where values come from, if stages are made here.
        results: Watch steps.
    """

    def __init__(self, run: Run, data: Data, weights: ModuleWeights, results: StepResults) -> None:
        self._run = run
        self._data = data
        self._weights = weights
        self._results = results
        self._evaluations: dict[Any, Evaluation | None] = {}
        """By the kind of the step; None for one that calls no network."""
        self._is_whole = self._is_forward_only = False
        self._outside: RandomStates | None = None

    def begin_validation(self) -> None:
        """Before all hooks of a validation: whatever it draws, the training draws on from here.

        Lightning leaves a validation out when a run goes on from a checkpoint of just before it,
        and the training must not notice.
        """
        self._outside = RandomStates.now() if self._run.trainer.state.fn == "fit" else None

    @contextmanager
    def outside_validation(self) -> Iterator[None]:
        """While inside, the random states are the training's, although a validation runs."""
        now = RandomStates.now()
        (self._outside or now).restore()
        yield
        now.restore()

    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A step of the module, such as its ``validation_step``, on a batch."""
        run, trainer = self._run, cast("Any", self._run.trainer)
        batch, *rest = (*args, *kwargs.values())
        step = self._results.step(name, rest, rest[0] if rest else 0)
        dataloader_idx = rest[1] if len(rest) > 1 else 0
        stop = ""
        if run.is_data_rank:
            is_last = trainer._active_loop.batch_progress.is_last_batch  # noqa: SLF001
            stop = run.stop.next_word_in_evaluation(is_last=is_last)
        context = getattr(run.precision_plugin, f"{name.replace('validation', 'val')}_context")
        with context():
            result = self._evaluate(step, batch, (name, dataloader_idx), stop)
        kind = run.namespace.callbacks.BasePredictionWriter
        writers = [c for c in trainer.callbacks if isinstance(c, kind)]
        if name == "predict_step" and any(writer.interval.on_batch for writer in writers):
            # They write at once, and have to know whose samples these were.
            self._results.share_indices(trainer.predict_loop, "current_batch_indices")
        return result

    def end(self) -> None:
        """An evaluation is over: without a training, every rank holds the whole module again.

        A training draws on from where it was.
        """
        if self._outside is not None:
            self._outside.restore()
            self._outside = None
        self._end_forwards()

    def evaluate(self, fn: Callable[[Any], Any], loader: Iterable[Any]) -> Iterator[Any]:
        """Run ``fn`` on every batch of a loader; every rank calls it.

        Args:
            fn: Calls pipelined submodules; its argument is a batch of the loader.
            loader: Read on the data rank only.

        Yields:
            What ``fn`` returns on the loss rank, None elsewhere.

        Raises:
            SIGTERMException: On all ranks, if one of them got the signal.
        """
        key = object()
        try:
            for batch in self._batches(loader):
                stop = self._run.stop.next_word_alone() if self._run.is_data_rank else ""
                result = self._evaluate(fn, batch, key, stop)
                self.end_if_agreed()
                yield result
        finally:
            self._evaluations.pop(key, None)

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches on the data rank; as many placeholders elsewhere."""
        run, transport = self._run, self._run.transport
        if not run.is_data_rank:
            while transport.broadcast_object(None, run.data_rank):
                yield None
            return
        for batch in isolated(loader):
            transport.broadcast_object(True, run.data_rank)
            yield self._data.transfer(batch)
        transport.broadcast_object(False, run.data_rank)

    def _evaluate(self, step: Callable[[Any], Any], batch: Any, key: Any, stop: str) -> Any:
        """A step as the pipeline runs it; the loss rank runs it alone where that can't."""
        run = self._run
        is_apart = (run.trainer.training or run.num_ranks == 1) and run.placed is None
        if not is_apart and not self._is_whole and key not in self._evaluations:
            try:
                self._evaluations[key] = self._begin(step, self._data.share(batch))
            except NoCallError:
                self._evaluations[key] = None
            except (CaptureError, ConfigurationError, PartitionError) as error:
                if run.trainer.state.fn == "fit":
                    raise
                self._end_forwards()
                # Of a module without values no rank can hold the whole.
                if run.transport.broadcast_object(is_on_meta(run.module), LOSS_RANK):
                    raise
                self._is_whole = True
                if run.is_loss_rank:
                    log.warning("rank %d evaluates alone, without a pipeline: %s", LOSS_RANK, error)
        evaluation = None if is_apart or self._is_whole else self._evaluations[key]
        if evaluation is None:
            return self._evaluate_whole(step, batch, stop)
        return evaluation.run(step, batch, stop)

    def end_if_agreed(self) -> None:
        """Stop here, on every rank, if all have heard of a SIGTERM.

        Raises:
            SIGTERMException: Lightning's own.
        """
        if self._run.stop.has_ended:
            raise self._run.namespace.sigterm_exception

    def _begin(self, step: Callable[[Any], Any], first: Any) -> Evaluation:
        run = self._run
        # Tensors that are made in inference mode could not be trained afterwards.
        with torch.inference_mode(mode=False), torch.no_grad():
            if run.placed is None:
                run.engine = set_up(run, self._weights, step, first, trains=False)
                summarize(run, run.engine)
                self._is_forward_only = True
                self._results.placed(run.engine)
            assert run.placed is not None
            return Evaluation(run.placed, step, first)

    def _end_forwards(self) -> None:
        """After an evaluation without a training: every rank holds the whole module again."""
        run, engine = self._run, self._run.engine
        self._is_whole = False
        if engine is None or not self._is_forward_only:
            return
        engine.mode.end()
        with torch.inference_mode(mode=False), torch.no_grad():
            if engine.materializer is not None:
                engine.materializer.drop()
            else:
                engine.shards.restore(run.pipeline_rank, run.transport)
                share_weights(engine.here)
        run.engine = None
        self.release()

    def release(self) -> None:
        """Other stages come: keep nothing of what these evaluated, or of a validation."""
        self._evaluations, self._outside = {}, None
        self._is_whole = self._is_forward_only = False

    def _evaluate_whole(self, step: Callable[[Any], Any], batch: Any, stop: str) -> Any:
        """Without a pipeline, the loss rank holds all networks."""
        refuse({
            "the module was built on the meta device and has no weights before the first training "
            "batch, so nothing can be evaluated before it":
            self._run.is_loss_rank and is_on_meta(self._run.module) and self._run.placed is None
        })  # fmt: skip
        transport, data_rank = self._run.transport, self._run.data_rank
        with waiting("the start of a step"):
            stop, batch = transport.broadcast_object((stop, on_cpu(batch)), data_rank)
        if self._run.is_data_rank:
            transport.finish_step(in_training=False)
        self._run.stop.hear(stop)
        if not self._run.is_loss_rank:
            return None
        if self._run.placed is None:
            self._run.module.to(self._run.root_device)
        return step(to_device(batch, self._run.root_device))
