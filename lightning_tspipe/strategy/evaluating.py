"""Validation, test and prediction steps in Lightning's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_tspipe.runtime.evaluation import Evaluation
from lightning_tspipe.runtime.weights import LOSS_RANK
from lightning_tspipe.strategy.batches import on_cpu, to_device
from lightning_tspipe.strategy.training import TrainingHooks


class EvaluationHooks(TrainingHooks):
    """The part of the strategy that evaluates."""

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
            return self._evaluation_step("predict_step", *args, **kwargs)

    def _evaluation_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        step = self._step(name, rest, rest[0] if rest else 0)
        dataloader_idx = rest[1] if len(rest) > 1 else 0
        return self.evaluate_batch(step, batch, key=(name, dataloader_idx))

    def evaluate_batch(self, step: Callable[[Any], Any], batch: Any, key: Any) -> Any:
        """Run a forward-only step on one batch; its result on the loss rank, None elsewhere."""
        if self._engine is None:
            return self._evaluate_whole(step, batch)
        if key not in self._evaluations:
            self._evaluations[key] = Evaluation(self._engine, step, self.share(batch))
        return self._evaluations[key].run(step, batch)

    def forget_evaluation(self, key: Any) -> None:
        """A forward-only step will not be run again."""
        self._evaluations.pop(key, None)

    def _evaluate_whole(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Before the networks are cut, and after training, the loss rank holds all of them."""
        data_rank = self.num_ranks - 1
        if self.is_data_rank and not self.is_loss_rank:
            self.transport.send_object(on_cpu(batch), LOSS_RANK)
            self.transport.finish_step()
        if not self.is_loss_rank:
            return None
        if not self.is_data_rank:
            batch = self.transport.receive_object(data_rank)
        device = next((p.device for p in self._module.parameters()), self.root_device)
        return step(to_device(batch, device))
