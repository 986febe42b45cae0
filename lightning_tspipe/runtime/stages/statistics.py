"""When the BatchNorm statistics of a step's calls are committed.

In the order in which the step makes its calls, whatever the order in which a schedule runs them;
and those of a teacher that runs ahead not before the step of their batch has begun: between two
steps the weights are those of a run without a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.networks.batchnorm import DeferredStatistics, Part
from lightning_tspipe.runtime.stages.call_order import CallOrder
from lightning_tspipe.runtime.stages.units import NETWORK_OF, StepUnits


class CallStatistics:
    """The statistics of all calls, as they collect and are committed.

    Args:
        deferred: Those of each network.
    """

    def __init__(self, deferred: Mapping[NetworkName, DeferredStatistics]) -> None:
        self._deferred = deferred
        self._orders: dict[tuple[int, Op, int], CallOrder] = {}
        self._ahead: list[tuple[NetworkName, tuple[int, int, int]]] = []

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
        return self._deferred[_network(action)].accumulate((batch, action.stage, unit.call))

    def ignored(self, action: Action) -> AbstractContextManager[None]:
        """Around a forward that has been counted before."""
        return self._deferred[_network(action)].ignored()

    def ran(self, batch: int, action: Action, units: StepUnits) -> None:
        """After a forward: commit the calls that are complete now, and all before them."""
        name = _network(action)
        for call in self._order(batch, action, units).ran(units.of(action).call):
            key = (batch, action.stage, call)
            if action.batch:
                self._ahead.append((name, key))
            else:
                self._deferred[name].commit(key)

    def _order(self, batch: int, action: Action, units: StepUnits) -> CallOrder:
        key = (batch, action.op, action.stage)
        if key not in self._orders:
            self._orders[key] = CallOrder(units.microbatches_at(action))
        return self._orders[key]

    def finish(self, batch: int) -> None:
        """The step of a batch is over."""
        for done in [key for key in self._orders if key[0] <= batch]:
            del self._orders[done]

    def commit_ahead(self, batch: int) -> None:
        """The step of a batch has begun, which may have run ahead."""
        for name, key in self._ahead:
            if key[0] <= batch:
                self._deferred[name].commit(key)
        self._ahead = [(name, key) for name, key in self._ahead if key[0] > batch]

    def drop_ahead(self) -> None:
        """The batch that ran ahead will not be trained."""
        self._orders.clear()
        for name, key in self._ahead:
            self._deferred[name].discard(key)
        self._ahead.clear()

    def ahead(self) -> dict[int, dict[nn.Module, list[Part]]]:
        """What ran ahead has collected, by call and layer."""
        found: dict[int, dict[nn.Module, list[Part]]] = {}
        for name, key in self._ahead:
            found.setdefault(key[-1], {}).update(self._deferred[name].collected(key))
        return found

    def uncommitted(self) -> list[tuple[NetworkName, int, int, int, dict[nn.Module, list[Part]]]]:
        """Network, batch, stage and call of what ran ahead, and what its layers have collected."""
        return [(name, *key, self._deferred[name].collected(key)) for name, key in self._ahead]

    def put_uncommitted(
        self, name: NetworkName, key: tuple[int, int, int], parts: Mapping[nn.Module, list[Part]]
    ) -> None:
        """As if this had been collected here."""
        self._deferred[name].put(key, parts)
        self._ahead.append((name, key))

    def put_ahead(self, statistics: Mapping[int, Mapping[nn.Module, list[Part]]]) -> None:
        """As if calls of the teacher had run ahead and collected this."""
        for call, parts in statistics.items():
            key = (-1, 0, call)
            self._deferred["teacher"].put(key, parts)
            self._ahead.append(("teacher", key))


def _network(action: Action) -> NetworkName:
    return NETWORK_OF[action.op]  # type: ignore[return-value]
