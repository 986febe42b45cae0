"""Validation, test and prediction steps in Lightning's hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_tspipe.errors import CaptureError, ConfigurationError, PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.execution.evaluation import Evaluation
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.materializing import is_on_meta
from lightning_tspipe.strategy.lightning.namespaces import world_of
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.setup.forwards import set_up_forwards
from lightning_tspipe.strategy.setup.weight_source import Origin, share_weights
from lightning_tspipe.strategy.training.batches import on_cpu, to_device
from lightning_tspipe.strategy.training.steps import TrainingHooks

if TYPE_CHECKING:
    from lightning_tspipe.runtime.execution.engine import Engine

log = logging.getLogger("lightning_tspipe")


class EvaluationHooks(TrainingHooks):
    """The part of the strategy that evaluates.

    In a training the stages are there. Otherwise they are made at the first batch, for as long as
    the evaluation lasts; a step that can't be captured runs on the loss rank alone.
    """

    _is_whole: bool
    _is_forward_only: bool
    _spread: Engine | None
    _outside: RandomStates | None

    def begin_validation(self) -> None:
        """Before all hooks of a validation: whatever it draws, the training draws on from here.

        Lightning leaves a validation out when a run goes on from a checkpoint of just before it,
        and the training must not notice.
        """
        if self._trainer.state.fn == "fit":
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

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluation_step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluation_step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            result = self._evaluation_step("predict_step", *args, **kwargs)
        writers = world_of(self).prediction_writers(self._trainer)
        if self.step_sync is not None and any(w.interval.on_batch for w in writers):
            self.step_sync.share_indices(self._trainer.predict_loop, "current_batch_indices")
        return result

    @override
    def on_validation_end(self) -> None:
        self._end_forwards()
        if self._outside is not None:
            self._outside.restore()
            self._outside = None

    @override
    def on_test_end(self) -> None:
        self._end_forwards()

    @override
    def on_predict_end(self) -> None:
        self._end_forwards()

    def _evaluation_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        step = self._step(name, rest, rest[0] if rest else 0)
        dataloader_idx = rest[1] if len(rest) > 1 else 0
        stop = ""
        if self.is_data_rank:
            loop: Any = self._trainer._active_loop  # noqa: SLF001
            is_last = loop.batch_progress.is_last_batch
            stop = self._stop.next_word_in_evaluation(is_last=is_last)
        return self._evaluate(step, batch, (name, dataloader_idx), stop)

    def evaluate_batch(self, step: Callable[[Any], Any], batch: Any, key: Any) -> Any:
        """Run a callback's forward-only step on one batch.

        Returns:
            Its result on the loss rank, None elsewhere.

        Raises:
            SIGTERMException: On all ranks, if one of them got the signal.
        """
        stop = self._stop.next_word_alone() if self.is_data_rank else ""
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
        if self._stop.has_ended:
            raise world_of(self).sigterm_exception

    def forget_evaluation(self, key: Any) -> None:
        """A forward-only step will not be run again."""
        self._evaluations.pop(key, None)

    def _evaluation_of(self, step: Callable[[Any], Any], batch: Any, key: Any) -> Evaluation | None:
        """A step as the pipeline runs it; None if the loss rank is to run it alone."""
        outside = (self._trainer.training or self.num_ranks == 1) and self._placed is None
        if outside or self._is_whole:
            return None
        if key not in self._evaluations:
            try:
                self._begin_evaluation(step, self.share(batch), key)
            except (CaptureError, ConfigurationError, PartitionError) as error:
                if self._trainer.state.fn == "fit":
                    raise
                self._end_forwards()
                # Of a module without values no rank can hold the whole.
                if self.transport.broadcast_object(is_on_meta(self._module), LOSS_RANK):
                    raise
                self._is_whole = True
                if self.is_loss_rank:
                    self._module.to(self.root_device)
                    log.warning("rank %d evaluates alone, without a pipeline: %s", LOSS_RANK, error)
                return None
        return self._evaluations[key]

    def _begin_evaluation(self, step: Callable[[Any], Any], first: Any, key: Any) -> None:
        # Tensors that are made in inference mode could not be trained afterwards.
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._placed is None:
                self._engine = set_up_forwards(
                    self._module,
                    self.options,
                    self.transport,
                    self.root_device,
                    self.precision_plugin.forward_context,
                    step,
                    first,
                    self.replicas,
                    self._origin(),
                    self._stop,
                )
                self._is_forward_only = True
                self.heads_here.placed(self._engine)
            assert self._placed is not None
            self._evaluations[key] = Evaluation(self._placed, step, first)

    @property
    def _placed(self) -> Engine | None:
        """The engine that has the stages; of a training that is over, if they stay spread."""
        return self._engine or self._spread

    def _end_forwards(self) -> None:
        """After an evaluation without a training: every rank holds the whole module again."""
        self._is_whole = False
        if self._engine is None or not self._is_forward_only:
            return
        self._engine.mode.end()
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._engine.materializer is not None:
                self._engine.materializer.drop()
            else:
                self._engine.shards.restore(self.pipeline_rank, self.transport)
                networks = find_networks(self._module, self.options)
                share_weights(self._module, networks, self.transport, Replicas(), Origin())
        self._engine = None
        self._evaluations = {}
        self._is_forward_only = False

    def _evaluate_whole(self, step: Callable[[Any], Any], batch: Any, stop: str) -> Any:
        """Without a pipeline, the loss rank holds all networks."""
        if is_on_meta(self._module) and self.is_loss_rank:
            raise ConfigurationError(
                "the module was built on the meta device and has no weights before the first "
                "training batch, so that nothing can be evaluated in a training before it"
            )
        if self.is_data_rank:
            for rank in range(self.num_ranks - 1):
                said = stop, on_cpu(batch) if rank == LOSS_RANK else None
                self.transport.send_object(said, rank)
            self.transport.finish_step(in_training=False)
        else:
            with waiting("the start of a step"):
                stop, batch = self.transport.receive_object(self.num_ranks - 1)
        self._stop.hear(stop)
        if not self.is_loss_rank:
            return None
        device = next((p.device for p in self._module.parameters()), self.root_device)
        return step(to_device(batch, device))
