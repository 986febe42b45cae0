"""Checkpoints: one ordinary Lightning file, whatever the stages are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_tspipe.strategy.evaluating import EvaluationHooks
from lightning_tspipe.strategy.training import plain_optimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer


class CheckpointHooks(EvaluationHooks):
    """The part of the strategy that saves and loads."""

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None:
            return self._module.state_dict()
        return self._engine.shards.state_dict(self.pipeline_rank, self.transport)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._engine is None:
            return super().optimizer_state(optimizer)
        return self._engine.shards.optimizer_state(plain_optimizer(optimizer), self.transport)
