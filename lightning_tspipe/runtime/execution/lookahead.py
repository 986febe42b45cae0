"""Lookahead: work on later batches that ran before their steps, with the weights of before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_tspipe.capture.plan import StepPlan, TensorSpec, ValueRef
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Op
from lightning_tspipe.networks.batchnorm import Part
from lightning_tspipe.runtime.execution.exchange import StageExchange
from lightning_tspipe.runtime.execution.rank_stages import RankStages
from lightning_tspipe.runtime.stages.captured import values_of_teacher
from lightning_tspipe.runtime.stages.units import StepUnits


@dataclass(frozen=True)
class Ahead:
    """What a teacher that ran ahead gave, for a checkpoint.

    Attributes:
        batch_sizes: Of the calls of the batch ahead.
        outputs: On the loss rank, the values that the step uses of each call of the teacher.
        statistics: Of each call, what this rank's BatchNorm layers will move towards, by their
            names in the LightningModule.
    """

    batch_sizes: tuple[int, ...]
    outputs: dict[tuple[int, ValueRef], Tensor]
    statistics: dict[int, dict[str, list[Part]]]


class Lookahead:
    """Keeps track of what has run ahead, here or in the run that a checkpoint comes from.

    Args:
        module: The LightningModule.
        plan: The captured step.
        stages: Hold the values.
        exchange: Gets those of other ranks.
        is_loss_rank: Whether the outputs are on this rank.

    Attributes:
        units: By their numbers, the units of the batches on which work has begun.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StepPlan,
        stages: RankStages,
        exchange: StageExchange,
        *,
        is_loss_rank: bool,
    ) -> None:
        self._module = module
        self._plan = plan
        self._stages = stages
        self._exchange = exchange
        self._is_loss_rank = is_loss_rank
        self._resumed: Ahead | None = None
        self.units: dict[int, StepUnits] = {}

    def state(self, index: int) -> Ahead | None:
        """What has run ahead of step ``index``, which has not begun; None if nothing has."""
        units = self.units.get(index)
        if units is None:
            return self._resumed
        self._exchange.receive_ahead({index: units}, for_loss=True)
        outputs = {}
        if self._is_loss_rank:
            whole = self._stages.outputs.whole
            outputs = {
                value: whole(index, units, *value) for value in values_of_teacher(self._plan)
            }
        names = {layer: name for name, layer in self._module.named_modules()}
        statistics: dict[int, dict[str, list[Part]]] = {}
        for stage in self._stages:
            for (_, _, call), layers in stage.statistics.ahead():
                found = {names[layer]: parts for layer, parts in layers.items()}
                statistics.setdefault(call, {}).update(found)
        return Ahead(_batch_sizes(units.inputs), outputs, statistics)

    def resume(self, ahead: Ahead | None) -> None:
        """Go on with what a checkpoint's run knew to have run ahead.

        Raises:
            CaptureError: The step uses other values of the teacher than that run's.
        """
        if ahead is not None and ahead.outputs.keys() != set(values_of_teacher(self._plan)):
            raise CaptureError(
                "the checkpoint was made within an epoch by a step that used its teacher in "
                "another way. Resume with that step, or from a checkpoint of the end of an epoch"
            )
        self._resumed = ahead

    def begin(self, index: int, units: StepUnits) -> bool:
        """The step of a batch begins.

        Returns:
            Whether work on it has begun before.
        """
        resumed, self._resumed = self._resumed, None
        # Otherwise the data is not that of the run that is resumed.
        if resumed is not None and resumed.batch_sizes == _batch_sizes(units.inputs):
            self._put(index, units, resumed)
            self.units[index] = units
        return index in self.units

    def done(self, index: int, worked_on: Mapping[int, StepUnits]) -> None:
        """The step of a batch ends.

        Args:
            index: The batch.
            worked_on: Units of the batches that it worked on, by their offset from ``index``.
        """
        self.units = {index + offset: units for offset, units in worked_on.items() if offset > 0}

    def drop(self) -> None:
        """The next batch is not one that work has begun on."""
        self._resumed = None
        if self.units:
            self._exchange.drop()
            self._stages.clear()
            self.units = {}

    def _put(self, index: int, units: StepUnits, ahead: Ahead) -> None:
        if self._is_loss_rank:
            self._stages.outputs.put_whole(index, units, ahead.outputs)
        layers = dict(self._module.named_modules())
        teacher = next((stage for stage in self._stages if stage.op is Op.TEACHER), None)
        for call, statistics in ahead.statistics.items():
            parts = {layers[name]: found for name, found in statistics.items() if name in layers}
            if teacher is not None:  # of its network, the layers that are here
                teacher.statistics.put_ahead((-1, 0, call), parts)


def _batch_sizes(inputs: Sequence[TensorSpec]) -> tuple[int, ...]:
    return tuple(spec.shape[0] for spec in inputs)
