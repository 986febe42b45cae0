"""A stage: one rank's part of a network, and all that it keeps of the batches in flight.

What flows through it, for one unit (a micro-batch of a call)::

    received ──► forward ──► passed on, outputs ──►   the next stage, and the loss
                    │ saved
    ◄── passed back ◄── backward ◄── gradients        from the next stage, and from the loss
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.networks.program import OutputRef, Ran
from lightning_tspipe.planning.placement import WHOLE, Pieces
from lightning_tspipe.runtime.stages.batchnorm import DeferredStatistics, Part
from lightning_tspipe.runtime.stages.captured import StepUnits
from lightning_tspipe.runtime.stages.network import ChainNetwork, stretches
from lightning_tspipe.runtime.stages.routes import RouteChain, Run
from lightning_tspipe.runtime.stages.split_backward import SplitBackward, arriving

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


_CURRENT = Versions()


@dataclass(eq=False)
class Stage:
    """One stage of a network: runs its forwards and backwards, and keeps the graphs in between.

    The BatchNorm statistics of its calls count in the order in which the step makes the calls,
    whatever the order in which a schedule runs their micro-batches. Those of a forward that runs
    ahead do not count before the step of its batch has begun: between two steps the weights are
    those of a run without a pipeline.

    Attributes:
        op: ``FORWARD`` for a stage that is trained, ``TEACHER`` for one that is forward-only.
        index: Its place in the network.
        network: The network; atoms of this stage hold real parameters.
        statistics: The deferred BatchNorm statistics of the network.
        runs: What runs atoms of a route, if not its chain.
        saved: What forwards have kept.
        versions: Which version of the weights is read.
        left: Of a batch, the calls in their order that are not complete, and how many micro-batches
            of each are still to run.
    """

    op: Op
    index: int
    network: ChainNetwork
    statistics: DeferredStatistics
    runs: Mapping[RouteChain, Run] = field(default_factory=dict)
    saved: dict[Place, Saved] = field(default_factory=dict)
    versions: Versions = _CURRENT
    left: dict[int, dict[int, int]] = field(default_factory=dict)
    _ahead: list[tuple[int, int, int]] = field(default_factory=list)
    """Batch, stage and call of statistics that do not count yet."""

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
        versions = self.versions if grad or self.op is Op.TEACHER else _CURRENT
        counting = self._counting(batch, action, units) if self.statistics else nullcontext()
        context = units.of(action).chain.context()
        with counting, context, versions.forward(batch, action.batch):
            passed, outputs = self._run(batch, action, units, inputs)
        if grad:
            self._save(batch, action, inputs, passed + outputs)
        return tuple(t.detach() for t in passed), tuple(t.detach() for t in outputs)

    def repeat(self, batch: int, action: Action, units: StepUnits, inputs: Tensors) -> None:
        """Run a forward for its backward alone: others have what it gives."""
        inputs = self._detached(action, units, inputs)
        # They have been counted before.
        with units.of(action).chain.context(), self.statistics.ignored():
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
        with arriving(saved.inputs) as arrived:
            if pairs:
                with self.versions.backward(place[0]):
                    torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        saved.results = []
        return _passed_back(saved.inputs, arrived)

    def input_backward(self, place: Place, gradients: Gradients) -> list[Tensor]:
        """Run the half of a backward that the stage before waits for; see :meth:`backward`."""
        saved = self.saved.get(place)
        if saved is None:
            return []
        saved.split = SplitBackward(saved.results, saved.inputs)
        saved.results = []
        with self.versions.backward(place[0]):
            arrived = saved.split.input_half(gradients)
        return _passed_back(saved.inputs, arrived)

    def weight_backward(self, place: Place) -> None:
        """Run the other half: the gradients of the weights."""
        saved = self.saved.pop(place, None)
        if saved is not None and saved.split is not None:
            with self.versions.backward(place[0]):
                saved.split.weight_half()

    def forget(self, batch: int) -> None:
        """Keep nothing of a batch that is over, nor of those before it."""
        self.saved = {place: saved for place, saved in self.saved.items() if place[0] > batch}
        self.left = {number: left for number, left in self.left.items() if number > batch}

    def clear(self) -> None:
        """Forget all batches: those that ran ahead will not be trained."""
        for key, _ in self.statistics_ahead():
            self.statistics.discard(key)
        self.saved.clear()
        self.left.clear()
        self._ahead.clear()

    def _detached(self, action: Action, units: StepUnits, received: Tensors) -> Tensors:
        """What a forward gets, as the beginning of a graph."""
        if not self._has_backward(action, units):
            return received
        return tuple(
            tensor.detach().requires_grad_(spec.requires_grad)
            for tensor, spec in zip(received, units.input_specs(action), strict=True)
        )

    def _run(
        self, batch: int, action: Action, units: StepUnits, inputs: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run the atoms; what is passed on, and the outputs."""
        unit, (first, last) = units.of(action), units.span(action)
        grad, rows = self._has_backward(action, units), slice(unit.start, unit.start + unit.size)
        chain, place = unit.chain, (batch, rows)
        passed, found = self.network.run(
            chain, inputs, first, last, grad=grad, run=self.runs.get(chain), place=place
        )
        outputs = tuple(found[ref] for ref in units.outputs(action))
        return () if last == unit.end else passed, outputs

    def _save(self, batch: int, action: Action, inputs: Tensors, results: Tensors) -> None:
        ends = [result for result in results if result.requires_grad]
        self.saved[batch, action.unit or 0] = Saved(inputs, ends)

    # BatchNorm statistics

    @contextmanager
    def _counting(self, batch: int, action: Action, units: StepUnits) -> Iterator[None]:
        """Around a forward: its layers collect, where they can't simply update.

        Afterwards the calls that are complete now are committed, and all before them.

        Args:
            batch: Number of the batch that the forward belongs to.
            action: The forward.
            units: Units of the batch.
        """
        unit = units.of(action)
        if batch not in self.left:
            self.left[batch] = units.microbatches_at(action)
        left = self.left[batch]
        updates = unit.is_only and next(iter(left)) == unit.call and not action.batch
        key = (batch, self.index, unit.call)
        with nullcontext() if updates else self.statistics.accumulate(key):
            yield
        left[unit.call] -= 1
        while left and not left[call := next(iter(left))]:
            del left[call]
            key = (batch, self.index, call)
            if action.batch:
                self._ahead.append(key)
            else:
                self.statistics.commit(key)

    def commit_ahead(self, batch: int) -> None:
        """The step of a batch has begun, which may have run ahead: its statistics count now."""
        for key in self._ahead:
            if key[0] <= batch:
                self.statistics.commit(key)
        self._ahead = [key for key in self._ahead if key[0] > batch]

    def statistics_ahead(self) -> list[tuple[tuple[int, int, int], dict[nn.Module, list[Part]]]]:
        """Batch, stage and call of what ran ahead, and what its layers have collected."""
        begun = [(b, self.index, call) for b, left in self.left.items() for call in left]
        return [(key, self.statistics.collected(key)) for key in (*self._ahead, *begun)]

    def put_ahead(self, key: tuple[int, int, int], parts: Mapping[nn.Module, list[Part]]) -> None:
        """As if these statistics had been collected here, for a batch, a stage and a call."""
        batch, _, call = key
        self.statistics.put(key, parts)
        if call not in self.left.get(batch, ()):
            self._ahead.append(key)


def _passed_back(inputs: Tensors, gradients: Gradients) -> list[Tensor]:
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(inputs, gradients, strict=True)
        if tensor.requires_grad
    ]


@dataclass(eq=False)
class Execution:
    """How a rank runs atoms of one network: as they are, compiled, in pieces, or once more.

    Of atoms that run again in the backward only the input is kept (Chen et al., *Training Deep Nets
    with Sublinear Memory Cost*, 2016); neighbours run again together::

        forward    x ──► a0 ──► a1 ──► a2 ──► y        kept: x, and what a2 saves
                         └─ again ─┘
        backward   x ──► a0 ──► a1, then their backward

    Attributes:
        run_atoms: Runs them as they are, or compiled.
        blocks: Its modules by name.
        statistics: Its deferred BatchNorm statistics.
        again: The atoms that run again in the backward.
        pieces: The first atoms that run on pieces of a batch, and into how many. Behind the last of
            them tensors have a row per sample, and before it nothing is emitted.
    """

    run_atoms: Run
    blocks: Mapping[str, nn.Module]
    statistics: DeferredStatistics
    again: Collection[int] = ()
    pieces: Pieces = WHOLE

    def __post_init__(self) -> None:
        self._stretches = cache(partial(stretches, is_so=self.again.__contains__))
        self._stateful = {
            f"{name}.{path}".rstrip("."): child
            for name, block in self.blocks.items()
            for path, child in block.named_modules()
            if child._buffers and not isinstance(child, _BatchNorm)  # noqa: SLF001
        }

    def run(self, received: Tensors, start: int, stop: int) -> Ran:
        """Run the atoms from ``start`` up to, not including, ``stop``; as ``Program.run``."""
        last = self.pieces.num_atoms
        if start > 0 or not 0 < last <= stop:  # not all of those: in an evaluation
            return self._run(received, start, stop)
        parts = zip(*(tensor.chunk(self.pieces.number) for tensor in received), strict=True)
        done = [self._run(part, start, last)[0] for part in parts]
        values = tuple(torch.cat(column) for column in zip(*done, strict=True))
        return self._run(values, last, stop) if last < stop else (values, {})

    def _run(self, received: Tensors, start: int, stop: int) -> Ran:
        if not self.again or not torch.is_grad_enabled():
            return self.run_atoms(received, start, stop)
        values = received
        outputs: dict[OutputRef, Tensor] = {}
        for first, last, again in self._stretches(start, stop):
            run = self._run_again if again else self.run_atoms
            values, new = run(values, first, last)
            outputs |= new
        return values, outputs

    def _run_again(self, received: Tensors, first: int, last: int) -> Ran:
        def run(*tensors: Tensor) -> Ran:
            return self.run_atoms(tensors, first, last)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            # Around the forward, and around its repetition, which must not count twice.
            return nullcontext(), self.statistics.ignored()

        before = self._versions()
        result: Ran = checkpoint(run, *received, use_reentrant=False, context_fn=contexts)
        for (name, key), version in self._versions().items():
            if version != before.get((name, key)):
                raise ConfigurationError(
                    f"{name} ({type(self._stateful[name]).__name__}) changes its buffer {key!r} "
                    "whenever it runs, and with activation_checkpointing it runs twice. Name the "
                    "atoms that may run twice: TSPipeStrategy(activation_checkpointing=[...])"
                )
        return result

    def _versions(self) -> dict[tuple[str, str], tuple[int, int]]:
        """What differs, of each buffer by its module and name, when it was written to."""
        return {
            (name, key): (id(buffer), buffer._version)  # noqa: SLF001
            for name, module in self._stateful.items()
            for key, buffer in module._buffers.items()  # noqa: SLF001
            if buffer is not None
        }
