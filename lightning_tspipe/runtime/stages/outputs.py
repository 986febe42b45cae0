"""Network outputs on their way to the losses, and the gradients that come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import ValueRef
from lightning_tspipe.ir.action import Action
from lightning_tspipe.runtime.stages.units import StepUnits

Values = dict[ValueRef, Tensor]


class Outputs:
    """One rank's share of it: what its stages give, and what its loss gets of others.

    Args:
        rank: The rank.
        student_ranks: The rank of each stage of the student.
        device: Where it computes.

    Attributes:
        values: By batch and the forward that made them.
        gradients: What the loss gives, by batch and the backward that reads it.
    """

    def __init__(self, rank: int, student_ranks: Sequence[int], device: torch.device) -> None:
        self._rank = rank
        self._student_ranks = student_ranks
        self._device = device
        self.values: dict[tuple[int, Action], Values] = {}
        self.gradients: dict[tuple[int, Action], list[Tensor | None]] = {}

    def put(
        self, batch: int, units: StepUnits, producer: Action, tensors: Sequence[Tensor]
    ) -> None:
        """Take what another rank has sent."""
        refs = units.outputs_of(producer)
        self.values[batch, producer] = dict(zip(refs, tensors, strict=True))

    def whole(self, batch: int, units: StepUnits, call: int, ref: ValueRef) -> Tensor:
        """One value of one call for the whole batch, detached."""
        parts = [self.values[batch, producer][ref] for producer in units.producers(call, ref)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.detach()

    def put_whole(
        self, batch: int, units: StepUnits, found: Mapping[tuple[int, ValueRef], Tensor]
    ) -> None:
        """As if the calls of a batch had run and given these values."""
        for (call, ref), whole in found.items():
            start = 0
            for producer in units.producers(call, ref):
                shapes = units.of(producer).shapes
                assert shapes is not None
                spec = shapes.outputs[ref]
                stop = start + spec.shape[0] if spec.shape else start
                part = whole if units.of(producer).is_only else whole[start:stop]
                self.values.setdefault((batch, producer), {})[ref] = part.to(self._device)
                start = stop

    def scatter_gradient(
        self, batch: int, units: StepUnits, call: int, gradients: Mapping[ValueRef, Tensor | None]
    ) -> None:
        """Cut the gradients of a call's outputs into micro-batches."""
        offsets = dict.fromkeys(gradients, 0)
        for action, unit, refs in units.loss_gradients(call):
            assert unit.shapes is not None
            parts: list[Tensor | None] = []
            for ref in refs:
                spec = unit.shapes.outputs[ref]
                start, whole = offsets.get(ref, 0), gradients.get(ref)
                stop = offsets[ref] = start + (spec.shape[0] if spec.shape else 0)
                if whole is not None:
                    parts.append(whole if unit.is_only else whole[start:stop])
                elif self._student_ranks[action.stage] == self._rank:
                    parts.append(None)
                else:
                    # Another rank waits for as many tensors as planned.
                    parts.append(torch.zeros(spec.shape, dtype=spec.dtype, device=self._device))
            self.gradients[batch, action] = parts

    def forget(self, batch: int) -> None:
        """Keep nothing of a batch that is over, nor of those before it."""
        for key in [key for key in self.values if key[0] <= batch]:
            del self.values[key]
        for key in [key for key in self.gradients if key[0] <= batch]:
            del self.gradients[key]

    def clear(self) -> None:
        """Forget all batches."""
        self.values.clear()
        self.gradients.clear()
