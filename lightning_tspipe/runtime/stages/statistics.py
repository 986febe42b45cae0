"""Commit the BatchNorm statistics of a stage's calls in the right order, and not too early.

They count in the order in which the step makes its calls, whatever the order in which a schedule
runs them. Those of a forward that runs ahead do not count before the step of its batch has begun:
between two steps the weights are those of a run without a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from lightning_tspipe.ir.action import Action
from lightning_tspipe.networks.batchnorm import DeferredStatistics, Part
from lightning_tspipe.runtime.stages.call_order import CallOrder
from lightning_tspipe.runtime.stages.units import StepUnits

Layers = dict[nn.Module, list[Part]]


class StageStatistics:
    """The statistics of a stage's calls, as they collect and are committed.

    Args:
        deferred: Those of the stage's network.
        stage: The stage.
    """

    def __init__(self, deferred: DeferredStatistics, stage: int) -> None:
        self._deferred = deferred
        self._stage = stage
        self._orders: dict[int, CallOrder] = {}
        self._ahead: list[tuple[int, int, int]] = []

    def collecting(
        self, batch: int, action: Action, units: StepUnits
    ) -> AbstractContextManager[None]:
        """Around a forward: its layers collect, where they can't simply update.

        Args:
            batch: Number of the batch that the forward belongs to.
            action: The forward.
            units: Units of the batch.
        """
        unit = units.of(action)
        is_next = self._order(batch, action, units).is_next(unit.call)
        if unit.is_only and is_next and not action.batch:
            return nullcontext()
        return self._deferred.accumulate((batch, self._stage, unit.call))

    def ignored(self) -> AbstractContextManager[None]:
        """Around a forward that has been counted before."""
        return self._deferred.ignored()

    def ran(self, batch: int, action: Action, units: StepUnits) -> None:
        """After a forward: commit the calls that are complete now, and all before them."""
        for call in self._order(batch, action, units).ran(units.of(action).call):
            key = (batch, self._stage, call)
            if action.batch:
                self._ahead.append(key)
            else:
                self._deferred.commit(key)

    def _order(self, batch: int, action: Action, units: StepUnits) -> CallOrder:
        if batch not in self._orders:
            self._orders[batch] = CallOrder(units.microbatches_at(action))
        return self._orders[batch]

    def finish(self, batch: int) -> None:
        """The step of a batch is over."""
        for done in [number for number in self._orders if number <= batch]:
            del self._orders[done]

    def commit_ahead(self, batch: int) -> None:
        """The step of a batch has begun, which may have run ahead."""
        for key in self._ahead:
            if key[0] <= batch:
                self._deferred.commit(key)
        self._ahead = [key for key in self._ahead if key[0] > batch]

    def drop_ahead(self) -> None:
        """The batches that ran ahead will not be trained."""
        self._orders.clear()
        for key in self._ahead:
            self._deferred.discard(key)
        self._ahead.clear()

    def ahead(self) -> list[tuple[tuple[int, int, int], Layers]]:
        """Batch, stage and call of what ran ahead, and what its layers have collected."""
        return [(key, self._deferred.collected(key)) for key in self._ahead]

    def put_ahead(self, key: tuple[int, int, int], parts: Mapping[nn.Module, list[Part]]) -> None:
        """As if this had been collected here, for a batch, a stage and a call."""
        self._deferred.put(key, parts)
        self._ahead.append(key)
