"""A stage: one rank's part of a network, and all that it keeps of the batches in flight.

What flows through it, for one unit (a micro-batch of a call)::

    received ──► forward ──► passed on, outputs ──►   the next stage, and the loss
                    │ saved
    ◄── passed back ◄── backward ◄── gradients        from the next stage, and from the loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.networks.batchnorm import DeferredStatistics, Part
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.split_backward import SplitBackward
from lightning_tspipe.runtime.stages.captured import StepUnits
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.stages.running import Run

Place = tuple[int, int]
"""Number of a batch, and a unit of it."""
Gradients = Sequence[Tensor | None]


@dataclass
class Saved:
    """What a forward keeps for its backward."""

    inputs: Tensors
    results: list[Tensor]
    split: SplitBackward | None = None
    number: int = field(default_factory=count().__next__)
    """In the order of all forwards."""


class Versions:
    """Says which version of the weights a stage reads: as it stands, always the current one."""

    def forward(self, batch: int, offset: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Around a forward of a batch that is so many steps before its own."""
        return nullcontext()

    def backward(self, batch: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Around a backward."""
        return nullcontext()


@dataclass(eq=False)
class Stage:
    """One stage of a network: runs its forwards and backwards, and keeps the graphs in between.

    Attributes:
        op: ``FORWARD`` for a stage that is trained, ``TEACHER`` for one that is forward-only.
        index: Its place in the network.
        network: The network; atoms of this stage hold real parameters.
        context: The precision plugin's forward context.
        statistics: When its BatchNorm statistics count.
        run: Runs atoms, if not the network's chain.
        saved: What forwards have kept.
        versions: Which version of the weights is read.
    """

    op: Op
    index: int
    network: ChainNetwork
    context: Callable[[], AbstractContextManager[None]]
    statistics: StageStatistics
    run: Run | None = None
    saved: dict[Place, Saved] = field(default_factory=dict)
    versions: Versions = field(default_factory=Versions)

    def _has_backward(self, action: Action, units: StepUnits) -> bool:
        return units.of(action).grad and self.op is Op.FORWARD

    def forward(
        self, batch: int, action: Action, units: StepUnits, received: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run a forward, and keep its graph if a backward follows.

        Args:
            batch: Number of the batch.
            action: The forward.
            units: Of the batch.
            received: What the stage before, or the data rank, gave.

        Returns:
            What is passed on, and the outputs that the loss reads; all detached.
        """
        inputs, grad = self._detached(action, units, received), self._has_backward(action, units)
        # A student's forward that nobody trains reads what is there.
        versions = self.versions if grad or self.op is Op.TEACHER else Versions()
        reading = versions.forward(batch, action.batch)
        with self.context(), reading, self.statistics.collecting(batch, action, units):
            passed, outputs = self._run(batch, action, units, inputs)
        self.statistics.ran(batch, action, units)
        if grad:
            self._save(batch, action, inputs, passed + outputs)
        return tuple(t.detach() for t in passed), tuple(t.detach() for t in outputs)

    def repeat(self, batch: int, action: Action, units: StepUnits, inputs: Tensors) -> None:
        """Run a forward for its backward alone: others have what it gives."""
        inputs = self._detached(action, units, inputs)
        with self.context(), self.statistics.ignored():
            passed, outputs = self._run(batch, action, units, inputs)
        self._save(batch, action, inputs, passed + outputs)

    def backward(self, place: Place, gradients: Gradients) -> list[Tensor]:
        """Run the whole backward of a unit.

        Args:
            place: The batch and the unit.
            gradients: Of what was passed on, and of the outputs.

        Returns:
            What is passed back: the gradients of the inputs.
        """
        saved = self.saved.pop(place, None)
        if saved is None:
            return []
        pairs = [(r, g) for r, g in zip(saved.results, gradients, strict=True) if g is not None]
        if pairs:
            with self.versions.backward(place[0]):
                torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        saved.results = []
        return _passed_back(saved.inputs, [tensor.grad for tensor in saved.inputs])

    def input_backward(self, place: Place, gradients: Gradients) -> list[Tensor]:
        """Run the half of a backward that the stage before waits for; see :meth:`backward`."""
        saved = self.saved.get(place)
        if saved is None:
            return []
        saved.split = SplitBackward(saved.results, saved.inputs)
        saved.results = []
        return _passed_back(saved.inputs, saved.split.input_half(gradients))

    def weight_backward(self, place: Place) -> None:
        """Run the other half: the gradients of the weights."""
        saved = self.saved.pop(place, None)
        if saved is not None and saved.split is not None:
            saved.split.weight_half()

    def forget(self, batch: int) -> None:
        """Keep nothing of a batch that is over, nor of those before it."""
        self.saved = {place: saved for place, saved in self.saved.items() if place[0] > batch}
        self.statistics.finish(batch)

    def clear(self) -> None:
        """Forget all batches."""
        self.saved.clear()
        self.statistics.drop_ahead()

    def _detached(self, action: Action, units: StepUnits, received: Tensors) -> Tensors:
        """What a forward gets, as the beginning of a graph."""
        grad = self._has_backward(action, units)
        return tuple(
            tensor.detach().requires_grad_(grad and spec.requires_grad)
            for tensor, spec in zip(received, units.input_specs(action), strict=True)
        )

    def _run(
        self, batch: int, action: Action, units: StepUnits, inputs: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run the atoms; what is passed on, and the outputs."""
        unit, (first, last) = units.of(action), units.span(action)
        grad, rows = self._has_backward(action, units), slice(unit.start, unit.start + unit.size)
        passed, found = self.network.run(
            inputs, first, last, grad=grad, run=self.run, place=(batch, rows)
        )
        outputs = tuple(found[ref] for ref in units.outputs_of(action))
        return () if last == unit.end else passed, outputs

    def _save(self, batch: int, action: Action, inputs: Tensors, results: Tensors) -> None:
        ends = [result for result in results if result.requires_grad]
        self.saved[batch, action.unit or 0] = Saved(inputs, ends)


def _passed_back(inputs: Tensors, gradients: Gradients) -> list[Tensor]:
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(inputs, gradients, strict=True)
        if tensor.requires_grad
    ]


@dataclass(eq=False)
class StageStatistics:
    """The BatchNorm statistics of a stage's calls: committed in the right order, not too early.

    They count in the order in which the step makes its calls, whatever the order in which a
    schedule runs their micro-batches. Those of a forward that runs ahead do not count before the
    step of its batch has begun: between two steps the weights are those of a run without a
    pipeline.

    Attributes:
        deferred: The statistics of the stage's network.
        stage: The stage.
    """

    deferred: DeferredStatistics
    stage: int
    _left: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of a batch, the calls in their order, and how many micro-batches are still to run."""
    _ahead: list[tuple[int, int, int]] = field(default_factory=list)

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
        if batch not in self._left:
            self._left[batch] = units.microbatches_at(action)
        if unit.is_only and next(iter(self._left[batch])) == unit.call and not action.batch:
            return nullcontext()
        return self.deferred.accumulate((batch, self.stage, unit.call))

    def ignored(self) -> AbstractContextManager[None]:
        """Around a forward that has been counted before."""
        return self.deferred.ignored()

    def ran(self, batch: int, action: Action, units: StepUnits) -> None:
        """After a forward: commit the calls that are complete now, and all before them."""
        left = self._left[batch]
        left[units.of(action).call] -= 1
        while left and not left[call := next(iter(left))]:
            del left[call]
            key = (batch, self.stage, call)
            if action.batch:
                self._ahead.append(key)
            else:
                self.deferred.commit(key)

    def finish(self, batch: int) -> None:
        """The step of a batch is over."""
        self._left = {number: left for number, left in self._left.items() if number > batch}

    def commit_ahead(self, batch: int) -> None:
        """The step of a batch has begun, which may have run ahead."""
        for key in self._ahead:
            if key[0] <= batch:
                self.deferred.commit(key)
        self._ahead = [key for key in self._ahead if key[0] > batch]

    def drop_ahead(self) -> None:
        """The batches that ran ahead will not be trained."""
        self._left.clear()
        for key in self._ahead:
            self.deferred.discard(key)
        self._ahead.clear()

    def ahead(self) -> list[tuple[tuple[int, int, int], dict[nn.Module, list[Part]]]]:
        """Batch, stage and call of what ran ahead, and what its layers have collected."""
        return [(key, self.deferred.collected(key)) for key in self._ahead]

    def put_ahead(self, key: tuple[int, int, int], parts: Mapping[nn.Module, list[Part]]) -> None:
        """As if this had been collected here, for a batch, a stage and a call."""
        self.deferred.put(key, parts)
        self._ahead.append(key)
