"""Run validation, test and prediction steps through the pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_tspipe.errors import CaptureError, ConfigurationError, PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.execution.evaluation import Evaluation
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.materializing import is_on_meta
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.setup.forwards import set_up_forwards
from lightning_tspipe.strategy.setup.weight_source import InitialWeights, share_weights
from lightning_tspipe.strategy.training.batches import on_cpu, to_device
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.head_logs import HeadsHere
from lightning_tspipe.strategy.training.module_weights import ModuleWeights
from lightning_tspipe.strategy.training.step_results import StepResults

log = logging.getLogger("lightning_tspipe")


class Evaluator:
    """Runs steps without a backward.

    In a training the stages are there. Otherwise they are made at the first batch, for as long as
    the evaluation lasts; a step that can't be captured runs on the loss rank alone.

    Args:
        run: The run.
        data: Its batches.
        weights: Where values come from, if stages are made here.
        results: Share what predictions leave behind.
        heads: Those of a fan-out.
    """

    def __init__(
        self, run: Run, data: Data, weights: ModuleWeights, results: StepResults, heads: HeadsHere
    ) -> None:
        self._run = run
        self._data = data
        self._weights = weights
        self._results = results
        self._heads = heads
        self._evaluations: dict[Any, Evaluation] = {}
        self._is_whole = self._is_forward_only = False
        self._outside: RandomStates | None = None

    def begin_fit(self) -> None:
        """A fit begins: nothing is left of a validation that was interrupted."""
        self._outside = None

    def begin_validation(self) -> None:
        """Before all hooks of a validation: whatever it draws, the training draws on from here.

        Lightning leaves a validation out when a run goes on from a checkpoint of just before it,
        and the training must not notice.
        """
        if self._run.trainer.state.fn == "fit":
            self._outside = RandomStates.now()

    @contextmanager
    def outside_validation(self) -> Iterator[None]:
        """While inside, the random states are the training's, although a validation runs."""
        if self._outside is None:
            yield
            return
        validation = RandomStates.now()
        self._outside.restore()
        yield
        validation.restore()

    def step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A step of the module, such as its ``validation_step``, on a batch."""
        run = self._run
        batch, *rest = (*args, *kwargs.values())
        step = self._data.step(name, rest, rest[0] if rest else 0)
        dataloader_idx = rest[1] if len(rest) > 1 else 0
        stop = ""
        if run.is_data_rank:
            loop: Any = run.trainer._active_loop  # noqa: SLF001
            is_last = loop.batch_progress.is_last_batch
            stop = run.stop.next_word_in_evaluation(is_last=is_last)
        context = getattr(run.precision_plugin, f"{name.replace('validation', 'val')}_context")
        with context():
            return self._evaluate(step, batch, (name, dataloader_idx), stop)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``predict_step``, and, if callbacks write at once, whose samples it had."""
        result = self.step("predict_step", *args, **kwargs)
        writers = self._run.lightning.namespace.prediction_writers(self._run.trainer)
        if any(writer.interval.on_batch for writer in writers):
            self._results.share_indices(self._run.trainer.predict_loop, "current_batch_indices")
        return result

    def end(self) -> None:
        """An evaluation is over: without a training, every rank holds the whole module again."""
        self._end_forwards()

    def end_validation(self) -> None:
        """The same; the training draws on from where it was."""
        self._end_forwards()
        if self._outside is not None:
            self._outside.restore()
            self._outside = None

    def evaluate_batch(self, step: Callable[[Any], Any], batch: Any, key: Any) -> Any:
        """Run a callback's forward-only step on one batch.

        Returns:
            Its result on the loss rank, None elsewhere.

        Raises:
            SIGTERMException: On all ranks, if one of them got the signal.
        """
        stop = self._run.stop.next_word_alone() if self._run.is_data_rank else ""
        result = self._evaluate(step, batch, key, stop)
        self.end_if_agreed()
        return result

    def _evaluate(self, step: Callable[[Any], Any], batch: Any, key: Any, stop: str) -> Any:
        evaluation = self._evaluation_of(step, batch, key)
        if evaluation is None:
            return self._evaluate_whole(step, batch, stop)
        return evaluation.run(step, batch, stop)

    def end_if_agreed(self) -> None:
        """Stop here, on every rank, if all have heard of a SIGTERM.

        Raises:
            SIGTERMException: Lightning's own.
        """
        if self._run.stop.has_ended:
            raise self._run.lightning.namespace.sigterm_exception

    def forget(self, key: Any) -> None:
        """A forward-only step will not be run again."""
        self._evaluations.pop(key, None)

    def _evaluation_of(self, step: Callable[[Any], Any], batch: Any, key: Any) -> Evaluation | None:
        """A step as the pipeline runs it; None if the loss rank is to run it alone."""
        run = self._run
        outside = (run.trainer.training or run.num_ranks == 1) and run.placed is None
        if outside or self._is_whole:
            return None
        if key not in self._evaluations:
            try:
                self._begin(step, self._data.share(batch), key)
            except (CaptureError, ConfigurationError, PartitionError) as error:
                if run.trainer.state.fn == "fit":
                    raise
                self._end_forwards()
                # Of a module without values no rank can hold the whole.
                if run.transport.broadcast_object(is_on_meta(run.module), LOSS_RANK):
                    raise
                self._is_whole = True
                if run.is_loss_rank:
                    run.module.to(run.root_device)
                    log.warning("rank %d evaluates alone, without a pipeline: %s", LOSS_RANK, error)
                return None
        return self._evaluations[key]

    def _begin(self, step: Callable[[Any], Any], first: Any, key: Any) -> None:
        run = self._run
        # Tensors that are made in inference mode could not be trained afterwards.
        with torch.inference_mode(mode=False), torch.no_grad():
            if run.placed is None:
                run.engine = set_up_forwards(
                    run.module,
                    run.options,
                    run.transport,
                    run.root_device,
                    run.precision_plugin.forward_context,
                    step,
                    first,
                    run.replicas,
                    self._weights.initial,
                    run.stop,
                )
                self._is_forward_only = True
                self._heads.placed(run.engine)
            assert run.placed is not None
            self._evaluations[key] = Evaluation(run.placed, step, first)

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
                networks = find_networks(run.module, run.options)
                share_weights(run.module, networks, run.transport, Replicas(), InitialWeights())
        run.engine = None
        self.release()

    def release(self) -> None:
        """Other stages come: keep nothing of what these evaluated."""
        self._evaluations = {}
        self._is_whole = self._is_forward_only = False

    def _evaluate_whole(self, step: Callable[[Any], Any], batch: Any, stop: str) -> Any:
        """Without a pipeline, the loss rank holds all networks."""
        if is_on_meta(self._run.module) and self._run.is_loss_rank:
            raise ConfigurationError(
                "the module was built on the meta device and has no weights before the first "
                "training batch, so that nothing can be evaluated in a training before it"
            )
        if self._run.is_data_rank:
            for rank in range(self._run.data_rank):
                said = stop, on_cpu(batch) if rank == LOSS_RANK else None
                self._run.transport.send_object(said, rank)
            self._run.transport.finish_step(in_training=False)
        else:
            with waiting("the start of a step"):
                stop, batch = self._run.transport.receive_object(self._run.data_rank)
        self._run.stop.hear(stop)
        if not self._run.is_loss_rank:
            return None
        device = next((p.device for p in self._run.module.parameters()), self._run.root_device)
        return step(to_device(batch, device))
