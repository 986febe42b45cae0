"""A stage: one rank's part of a network, and all that it holds of the batches in flight.

What flows through it, for one unit (a micro-batch of a call)::

    received ──► forward ──► passed_on ──►         the next stage
                    │ saved
    ◄── passed_back ◄── backward ◄── gradients     from the next stage, and from the loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import ValueRef
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.split_backward import SplitBackward
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.stages.running import Run
from lightning_tspipe.runtime.stages.statistics import StageStatistics
from lightning_tspipe.runtime.stages.units import StepUnits

Place = tuple[int, int]
"""Number of a batch, and a unit of it."""


@dataclass
class Saved:
    """What a forward keeps for its backward."""

    inputs: Tensors
    results: list[Tensor]
    recyclable: list[Tensor]
    split: SplitBackward | None = None
    number: int = field(default_factory=count().__next__)
    """In the order of all forwards."""


class Versions(Protocol):
    """Says which version of the weights a stage reads."""

    def forward(self, batch: int, offset: int) -> AbstractContextManager[None]:
        """Around a forward of a batch that is so many steps before its own."""

    def backward(self, batch: int) -> AbstractContextManager[None]:
        """Around a backward."""


class Stage:
    """One stage of a network: runs its forwards and backwards, and keeps what they need.

    Args:
        op: ``FORWARD`` for a stage that is trained, ``TEACHER`` for one that is forward-only.
        index: Its place in the network.
        network: The network; atoms of this stage hold real parameters.
        context: The precision plugin's forward context.
        statistics: When its BatchNorm statistics count.
        recycle: Takes memory back that came from the transport.
        run: Runs atoms, if not the network's chain.

    Attributes:
        received: What other ranks have sent for a forward.
        passed_on: What a forward gave for the next stage.
        gradients: What the next stage has sent for a backward.
        passed_back: What a backward gave for the stage before.
        saved: What forwards have kept.
        versions: Which version of the weights is read; None: always the current one.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a stage
        self,
        op: Op,
        index: int,
        network: ChainNetwork,
        context: Callable[[], AbstractContextManager[None]],
        statistics: StageStatistics,
        recycle: Callable[[Sequence[Tensor]], None],
        run: Run | None = None,
    ) -> None:
        self.op = op
        self.index = index
        self.network = network
        self.statistics = statistics
        self._context = context
        self._recycle = recycle
        self._run_atoms = run
        self.received: dict[Place, Tensors] = {}
        self.passed_on: dict[Place, Tensors] = {}
        self.gradients: dict[Place, list[Tensor | None]] = {}
        self.passed_back: dict[Place, list[Tensor | None]] = {}
        self.saved: dict[Place, Saved] = {}
        self.versions: Versions | None = None

    def _has_backward(self, action: Action, units: StepUnits) -> bool:
        return units.of(action).grad and self.op is Op.FORWARD

    def forward(
        self, batch: int, action: Action, units: StepUnits, taken: Tensors, *, is_received: bool
    ) -> dict[ValueRef, Tensor]:
        """Run a forward, and keep its graph if a backward follows.

        Args:
            batch: Number of the batch.
            action: The forward.
            units: Of the batch.
            taken: What the stage before, or the data rank, gave.
            is_received: Whether its memory came from the transport.

        Returns:
            What the loss reads of it, detached.
        """
        inputs, grad = self._detached(action, units, taken), self._has_backward(action, units)
        reading: AbstractContextManager[None] = nullcontext()
        if self.versions is not None and (grad or self.op is Op.TEACHER):
            reading = self.versions.forward(batch, action.batch)
        with self._context(), reading, self.statistics.collecting(batch, action, units):
            values, found = self._run(batch, action, units, inputs)
        self.statistics.ran(batch, action, units)
        place = (batch, action.unit or 0)
        if values:
            self.passed_on[place] = tuple(tensor.detach() for tensor in values)
        recyclable = _unshared(inputs, (*values, *found.values())) if is_received else []
        if grad:
            results = (*values, *(found[ref] for ref in units.outputs_of(action)))
            self._keep(place, inputs, results, recyclable)
        else:
            self._recycle(recyclable)
        return {ref: tensor.detach() for ref, tensor in found.items()}

    def repeat(self, batch: int, action: Action, units: StepUnits, inputs: Tensors) -> None:
        """Run a forward for its backward alone: others have what it gives."""
        inputs = self._detached(action, units, inputs)
        with self._context(), self.statistics.ignored():
            values, found = self._run(batch, action, units, inputs)
        results = (*values, *(found[ref] for ref in units.outputs_of(action)))
        self._keep((batch, action.unit or 0), inputs, results, [])

    def backward(self, place: Place, gradients: list[Tensor | None]) -> None:
        """Run the whole backward of a unit.

        Args:
            place: The batch and the unit.
            gradients: Of what was passed on, and of what the loss read.
        """
        saved = self.saved.pop(place, None)
        if saved is None:
            return
        pairs = [(r, g) for r, g in zip(saved.results, gradients, strict=True) if g is not None]
        if pairs:
            with nullcontext() if self.versions is None else self.versions.backward(place[0]):
                torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        self._pass_back(place, saved, [tensor.grad for tensor in saved.inputs])
        self._release(saved)

    def input_backward(self, place: Place, gradients: list[Tensor | None]) -> None:
        """Run the half of a backward that the stage before waits for; see :meth:`backward`."""
        saved = self.saved.get(place)
        if saved is None:
            return
        saved.split = SplitBackward(saved.results, saved.inputs)
        saved.results = []
        self._pass_back(place, saved, saved.split.input_half(gradients))

    def weight_backward(self, place: Place) -> None:
        """Run the other half: the gradients of the weights."""
        saved = self.saved.pop(place, None)
        if saved is not None and saved.split is not None:
            saved.split.weight_half()
            self._release(saved)

    @staticmethod
    def unused(action: Action, units: StepUnits) -> list[Tensor | None]:
        """In the place of gradients of what is passed on, where nobody gives any."""
        unit, (_, last) = units.of(action), units.span(action)
        assert unit.shapes is not None
        passed = unit.shapes.boundaries[last] if last < unit.end else ()
        return [None for spec in passed if spec.requires_grad]

    def forget(self, batch: int) -> None:
        """Keep nothing of a batch that is over, nor of those before it."""
        for store in self._stores():
            for place in [place for place in store if place[0] <= batch]:
                del store[place]
        self.statistics.finish(batch)

    def clear(self) -> None:
        """Forget all batches."""
        for store in self._stores():
            store.clear()
        self.statistics.drop_ahead()

    def _stores(self) -> tuple[dict[Place, Any], ...]:
        return self.received, self.passed_on, self.gradients, self.passed_back, self.saved

    def _detached(self, action: Action, units: StepUnits, taken: Tensors) -> Tensors:
        """What a forward gets, as the beginning of a graph."""
        grad = self._has_backward(action, units)
        return tuple(
            tensor.detach().requires_grad_(grad and spec.requires_grad)
            for tensor, spec in zip(taken, units.input_specs(action), strict=True)
        )

    def _run(
        self, batch: int, action: Action, units: StepUnits, inputs: Tensors
    ) -> tuple[Tensors, dict[ValueRef, Tensor]]:
        """Run the atoms; what is passed on, and what the loss reads."""
        unit, (first, last) = units.of(action), units.span(action)
        self.network.about_to_run(batch, slice(unit.start, unit.start + unit.size))
        grad = self._has_backward(action, units)
        values, found = self.network.run(inputs, first, last, grad=grad, run=self._run_atoms)
        return () if last == unit.end else values, found

    def _keep(
        self, place: Place, inputs: Tensors, results: Tensors, recyclable: list[Tensor]
    ) -> None:
        ends = [result for result in results if result.requires_grad]
        self.saved[place] = Saved(inputs, ends, recyclable)

    def _pass_back(self, place: Place, saved: Saved, gradients: Sequence[Tensor | None]) -> None:
        if self.index > 0:
            self.passed_back[place] = [
                torch.zeros_like(tensor) if gradient is None else gradient
                for tensor, gradient in zip(saved.inputs, gradients, strict=True)
                if tensor.requires_grad
            ]

    def _release(self, saved: Saved) -> None:
        saved.results = []
        self._recycle(saved.recyclable)


def _unshared(inputs: Tensors, made: Tensors) -> list[Tensor]:
    """The inputs whose memory nothing that was made of them uses."""
    used = {tensor.untyped_storage().data_ptr() for tensor in made}
    return [tensor for tensor in inputs if tensor.untyped_storage().data_ptr() not in used]
