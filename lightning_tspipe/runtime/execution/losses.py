"""The losses of a rank: the step runs once more there, with the networks' real outputs.

The step's caller runs the backward of what it returns, so that a loss is run in two halves::

    run 1st time    outputs ──► the step (replay) ──► what it returns
    run 2nd time    its backward ──► gradients of the outputs, cut into micro-batches
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_tspipe.capture.location import current_line
from lightning_tspipe.capture.plan import StepPlan, ValueRef
from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.runtime.execution.executor import OF_LOSS, Handler, RankStages, StepContext
from lightning_tspipe.runtime.stages.captured import StepUnits

Value = tuple[int, ValueRef]
"""A call, and a value of it."""


@dataclass(eq=False)
class Losses:
    """Replays steps, and runs the backwards of their losses.

    Attributes:
        plan: The captured step.
        runner: Runs it.
        stages: Hold what the networks give.
        device: Where this rank computes.
        handlers: What of a rank's actions runs them, in its training mode.
        leaves: What the step's calls gave so far, where gradients are wanted.
        given: The networks' values in this step, if they are not those that were computed.
    """

    plan: StepPlan
    runner: StepRunner
    stages: RankStages
    device: torch.device
    handlers: dict[Op, Handler] = field(default_factory=dict)
    leaves: dict[Value, Tensor] = field(default_factory=dict)
    given: Mapping[Value, Tensor] = field(default_factory=dict)
    _prepared: tuple[Step, Callable[[], Any], int] | None = None
    _context: StepContext | None = None
    _started: tuple[Action, float] | None = None
    _run_backward: Callable[[], None] | None = None

    def prepare(self, step: Step, batch: Callable[[], Any], seed: int) -> None:
        """A step begins.

        Args:
            step: What will run.
            batch: Gives its batch, when the outputs are here.
            seed: Seed of its random stream.
        """
        self._prepared = step, batch, seed

    def prepare_backward(self, run_backward: Callable[[], None]) -> None:
        """The caller is about to have the backward run, in the middle of the replay at times."""
        self._run_backward = run_backward
        self._note()

    def run(self, context: StepContext, action: Action) -> bool:
        """Run the half of a loss whose turn it is; whether it is over."""
        if self._run_backward is None:
            self._replay(context, action)
            return False
        run, self._run_backward = self._run_backward, None
        run()
        for call in self.plan.calls_of("student"):
            self._scatter_gradients(context.index, context.units[0], call)
        self.leaves = {}
        return True

    def _replay(self, context: StepContext, action: Action) -> None:
        assert self._prepared is not None
        step, batch_of, seed = self._prepared
        self.leaves, self._context = {}, context
        batch = batch_of()
        self._started = action, time.perf_counter()
        context.result = self.runner.replay(step, batch, seed, self._output)
        self._note()

    def _note(self) -> None:
        """The loss is there."""
        if self._started is not None and self._context is not None:
            self.stages.recorder.ran(self._context.index, *self._started)
        self._started = None

    def done(self) -> None:
        """The step is over: a replay that goes on can't call networks any more."""
        self._context = self._prepared = None
        self.given = {}

    def _output(self, call: int, ref: ValueRef) -> Tensor:
        context = self._context
        if context is None:
            raise CaptureError(
                f"the step calls a pipelined network at {current_line()}, after an optimizer made "
                "use of the gradients of the calls before: a batch goes through the pipeline once, "
                "there and back. Make all calls before the first optimizer.step, or update one "
                "network per batch, as in `if batch_idx % 2 == 0: opt_a.step()`"
            )
        if self.given:
            return self.given[call, ref]
        tensor = self.stages.value(context.index, context.units[0], call, ref)
        units = context.units[0].units[self.plan.calls[call].network]
        spec = next(u.shapes.outputs[ref] for u in units if u.call == call and u.shapes is not None)
        if spec.requires_grad and torch.is_grad_enabled():
            tensor.requires_grad_()
            self.leaves[call, ref] = tensor
        return tensor

    def _scatter_gradients(self, batch: int, units: StepUnits, call: int) -> None:
        """Cut the gradients of a call's outputs into micro-batches."""
        starts: dict[ValueRef, int] = {}
        for action, specs in units.loss_gradients(call):
            is_only = units.of(action).is_only
            parts: list[Tensor | None] = []
            for ref, spec in specs.items():
                leaf, start = self.leaves.get((call, ref)), starts.get(ref, 0)
                stop = starts[ref] = start + (spec.shape[0] if spec.shape else 0)
                if leaf is not None and leaf.grad is not None:
                    parts.append(leaf.grad if is_only else leaf.grad[start:stop])
                elif self.stages.holds(action):
                    parts.append(None)
                else:
                    # Another rank waits for as many tensors as planned.
                    parts.append(torch.zeros(spec.shape, dtype=spec.dtype, device=self.device))
            self.stages.buffers[batch, action, OF_LOSS] = parts
