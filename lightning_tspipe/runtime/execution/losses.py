"""The losses of a rank: the step runs once more there, with the networks' real outputs.

The step's caller runs the backward of what it returns, so that a loss is run in two halves::

    run 1st time    outputs ──► the step (replay) ──► what it returns
    run 2nd time    its backward ──► gradients of the outputs, cut into micro-batches
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_tspipe.capture.location import current_line
from lightning_tspipe.capture.plan import StepPlan, ValueRef
from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Action
from lightning_tspipe.runtime.execution.context import StepContext
from lightning_tspipe.runtime.recording import Recorder
from lightning_tspipe.runtime.stages.captured import values_of_teacher
from lightning_tspipe.runtime.stages.outputs import Outputs

Value = tuple[int, ValueRef]
"""A call, and a value of it."""


class Losses:
    """Replays steps, and runs the backwards of their losses.

    Args:
        plan: The captured step.
        runner: Runs it.
        outputs: Holds what the networks give.
        recorder: Notes when what ran.

    Attributes:
        teacher_values: The values of the teacher's calls that the step uses.
    """

    def __init__(
        self, plan: StepPlan, runner: StepRunner, outputs: Outputs, recorder: Recorder
    ) -> None:
        self._plan = plan
        self.teacher_values = values_of_teacher(plan)
        self._runner = runner
        self._outputs = outputs
        self._recorder = recorder
        self._step: Step | None = None
        self._batch: Callable[[], Any] = lambda: None
        self._seed = 0
        self._context: StepContext | None = None
        self._leaves: dict[Value, Tensor] = {}
        self._given: Mapping[Value, Tensor] = {}
        self._started: tuple[Action, float] | None = None
        self._run_backward: Callable[[], None] | None = None

    def prepare(self, step: Step, batch: Callable[[], Any], seed: int) -> None:
        """A step begins.

        Args:
            step: What will run.
            batch: Gives its batch, when the outputs are here.
            seed: Seed of its random stream.
        """
        self._step, self._batch, self._seed = step, batch, seed

    def prepare_backward(self, run_backward: Callable[[], None]) -> None:
        """The caller is about to have the backward run, in the middle of the replay at times."""
        self._run_backward = run_backward
        self._note()

    @property
    def leaves(self) -> list[Tensor]:
        """What the step's calls gave so far, where gradients are wanted."""
        return list(self._leaves.values())

    def give(self, values: Mapping[Value, Tensor]) -> None:
        """In this step the networks' values are these."""
        self._given = values

    def computed(self, context: StepContext, values: Sequence[Value]) -> list[Tensor]:
        """Values of the networks' calls of this batch, whole."""
        units = context.units[0]
        return [self._outputs.whole(context.index, units, *value) for value in values]

    def run(self, context: StepContext, action: Action) -> bool:
        """Run the half of a loss whose turn it is; whether it is over."""
        if self._run_backward is None:
            self._replay(context, action)
            return False
        run, self._run_backward = self._run_backward, None
        run()
        units = context.units[0]
        for call in self._plan.calls_of("student"):
            gradients = {ref: t.grad for (c, ref), t in self._leaves.items() if c == call}
            self._outputs.scatter_gradient(context.index, units, call, gradients)
        self._leaves = {}
        return True

    def _replay(self, context: StepContext, action: Action) -> None:
        assert self._step is not None
        self._leaves, self._context = {}, context
        batch = self._batch()
        self._started = action, time.perf_counter()
        context.result = self._runner.replay(self._step, batch, self._seed, self._output)
        self._note()

    def _note(self) -> None:
        """The loss is there."""
        if self._started is not None and self._context is not None:
            self._recorder.ran(self._context.index, *self._started)
        self._started = None

    def done(self) -> None:
        """The step is over: a replay that goes on can't call networks any more."""
        self._context = self._step = None
        self._batch = lambda: None
        self._given = {}

    def suspended(self) -> AbstractContextManager[None]:
        """While inside, a replay that is running pauses: the networks are at hand."""
        return self._runner.suspended()

    def _output(self, call: int, ref: ValueRef) -> Tensor:
        context = self._context
        if context is None:
            raise CaptureError(
                f"the step calls a pipelined network at {current_line()}, after an optimizer made "
                "use of the gradients of the calls before: a batch goes through the pipeline once, "
                "there and back. Make all calls before the first optimizer.step, or update one "
                "network per batch, as in `if batch_idx % 2 == 0: opt_a.step()`"
            )
        if self._given:
            return self._given[call, ref]
        (tensor,) = self.computed(context, [(call, ref)])
        units = context.units[0].units[self._plan.calls[call].network]
        spec = next(u.shapes.outputs[ref] for u in units if u.call == call and u.shapes is not None)
        if spec.requires_grad and torch.is_grad_enabled():
            tensor.requires_grad_()
            self._leaves[call, ref] = tensor
        return tensor
