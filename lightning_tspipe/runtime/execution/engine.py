"""One rank's part in training, step after step.

The engine knows nothing of Lightning: ``strategy`` calls it from Lightning's hooks, tests call it
from threads. One step::

    forward(step, batch, ahead):  effects, data | student forwards, teacher forwards | loss
    backward(loss, run):          backward of the loss | backwards, teacher forwards ahead

Where student forwards run ahead too (``1f1b``), they are in the first half.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_tspipe.capture.location import current_line
from lightning_tspipe.capture.plan import TensorSpec, ValueRef
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import lower
from lightning_tspipe.runtime.batches.metadata import Kept, StepHeader, send_fields
from lightning_tspipe.runtime.execution import in_flight as flights
from lightning_tspipe.runtime.execution.context import StepContext
from lightning_tspipe.runtime.execution.resuming import Resumable
from lightning_tspipe.runtime.transport.base import Receipt
from lightning_tspipe.runtime.transport.channels import Channel
from lightning_tspipe.schedules.phases import teacher_only

_BACKWARDS = frozenset({Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD, Op.OPTIMIZER})

BatchAndStep = tuple[Any, Step]


def _is_ahead(action: Action) -> bool:
    """Whether it reads the teacher as this step leaves it behind."""
    return action.op is Op.TEACHER and action.batch > 0


class Engine(Resumable):
    """One rank of the pipeline, step after step; made as a :class:`Rank` is.

    Attributes:
        batch_size: Samples of the current step's largest call.
        teacher_ran_ahead: Whether the teacher of the current step ran in the step before.
    """

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._step: StepContext | None = None
        self._leaves: dict[tuple[int, ValueRef], Tensor] = {}
        self._rest_actions: Sequence[Action] = ()
        self._features: dict[tuple[int, ValueRef], Tensor] = {}
        self._replay_started: float | None = None
        self.batch_size = 1
        self.teacher_ran_ahead = False

    @property
    def outputs(self) -> list[Tensor]:
        """On the loss rank: what the step's calls gave so far, where gradients are wanted."""
        return list(self._leaves.values())

    def forward(
        self,
        step: Step,
        batch: Any,
        ahead: Sequence[BatchAndStep] = (),
        *,
        replay: Step | None = None,
    ) -> Any:
        """The part of a step up to the loss.

        Args:
            step: The step, a function of the batch.
            batch: The batch, on the data rank.
            ahead: On the data rank, the next batches and their steps, as far as they may be worked
                on now, and up to :attr:`lookahead` of them. They are the batches of the next calls,
                unless :meth:`drain` is called on all ranks.
            replay: What runs on the loss rank in place of ``step``, with the real outputs; it may
                call :meth:`backward` itself, within :meth:`suspended`.

        Returns:
            On the loss rank what the step returns, elsewhere None.
        """
        recorder = self.executor.recorder
        if self.pace is not None:
            self.pace.begin_step()
        context, header = self._open_step(step, batch, ahead)
        self._step = context
        self.batch_size = header.batch_size
        executor, plan = self.executor, self.captured.plan
        executor.post_receives(context)
        if not self.is_data_rank:
            started = time.perf_counter()
            if plan.has_effects:
                self._runner.effects(step, header.batch(), self._seed + self._index)
            recorder.ran(self._index, Action(Op.EFFECTS, self.rank), started)
        executor.statistics.commit_ahead(self._index)
        actions = context.program.schedule.ranks[self.rank]
        ends = _BACKWARDS | {Op.LOSS if self.heads is None else Op.FORWARD}
        stop = next(i for i, action in enumerate(actions) if action.op in ends)
        started = time.perf_counter()
        fields = self._exchange_fields(header, batch)
        recorder.paused("send", started)
        late = next(i for i, action in enumerate(actions) if i == stop or _is_ahead(action))
        executor.run(context, actions[:late])
        if plan.has_late_effects:
            assert not any(a.op is Op.TEACHER and not a.batch for a in actions[late:]), actions
            self._runner.late_effects(step, header.batch(), self._seed + self._index)
        executor.run(context, actions[late:stop])
        self._rest_actions = self._executed(actions[stop:])
        if not self.computes_loss:
            return None
        executor.await_outputs(context, actions[stop])
        whole = batch
        if not self.is_data_rank:
            started = time.perf_counter()
            whole = header.batch(plan.batch_fields, fields)
            recorder.paused("receive", started)
        self._leaves = {}
        return self._replay(replay or step, whole)

    def _replay(self, step: Step, batch: Any) -> Any:
        """What the step returns, with the real outputs."""
        if self.heads is not None and not self.heads.student.trained:
            # All of this rank's heads have stopped.
            return torch.zeros((), device=self.device, requires_grad=True)
        self._replay_started = time.perf_counter()
        result = self._runner.replay(step, batch, self._seed + self._index, self._output)
        self._note_replay()
        return result

    def _executed(self, actions: Sequence[Action]) -> Sequence[Action]:
        """What the executor runs of some actions: heads run in the replay."""
        if self.heads is None:
            return actions
        return [action for action in actions if action.op is Op.TEACHER]

    def _note_replay(self) -> None:
        """The loss is there."""
        if self._replay_started is not None:
            self._note_loss(Op.FORWARD, self._replay_started)
            self._replay_started = None

    def _note_loss(self, half: Op, started: float) -> None:
        """Note the loss, or its backward; of heads, what it comes from runs along with it."""
        loss = Action(Op.LOSS, self.rank)
        if self.heads is not None:
            loss = Action(half, self.pipeline.stages_of(self.rank)[0], 0)
        self.executor.recorder.ran(self._index, loss, started)

    def suspended(self) -> AbstractContextManager[None]:
        """While inside, a replay that calls this is as good as over: the networks are at hand."""
        return self._runner.suspended()

    def _open_step(
        self, step: Step, batch: Any, ahead: Sequence[BatchAndStep]
    ) -> tuple[StepContext, StepHeader]:
        """Tell of the batches, or hear of them, and choose the program."""
        number, known = self._index, self.announcements
        inputs = self._announce(step, batch, ahead) if self.is_data_rank else ()
        started = time.perf_counter()
        last = known.await_batches(number, number + self._programs.lookahead[self.rank])
        if not self.is_data_rank:
            self.executor.recorder.paused("receive", started)
        known.hear(number + min(self._programs.lookahead))
        units = {n - number: self._units(known[n]) for n in range(number, last + 1)}
        if self._front is not None:
            self._front.expect({n: known[n].samples for n in range(number, last + 1)})
        resumed = self._take_flights(known[number])
        has_begun = self._lookahead.begin(number, units[0]) or resumed is not None
        self.teacher_ran_ahead = has_begun
        program = self._programs.of(fresh=not has_begun, ahead=last - number)
        context = StepContext(number, program, units)
        if resumed is not None and self.weights is not None:
            flights.read_back(
                resumed, self.executor, self.weights, context, self.module, self.device
            )
        if self.is_data_rank:
            context.inputs = {n - number: made for n, made in self._inputs.items() if n <= last}
            context.inputs[0] = inputs
            for action in program.schedule.ranks[self.rank]:
                if action.op is Op.DATA:
                    self.executor.send_inputs(context, action.batch)
        return context, known[number]

    def _announce(
        self, step: Step, batch: Any, ahead: Sequence[BatchAndStep]
    ) -> tuple[Tensor, ...]:
        """On the data rank: find the call inputs, and tell of the batches that are new.

        Returns:
            The call inputs of this batch.

        Raises:
            CaptureError: Its calls have other shapes than when they ran ahead.
        """
        started, number = time.perf_counter(), self._index
        told = self._inputs.get(number)
        if told is not None and self._replays_all:
            own, kept = told, None
        else:
            own = self._runner.inputs(step, batch, self._seed + number, effects=True)
            kept = self._kept_of(number, batch, own)
            own = own if kept is None else kept.select(own)
        if told is not None and list(map(TensorSpec.of, told)) != list(map(TensorSpec.of, own)):
            raise CaptureError(
                "the calls of this batch have other shapes than when they ran ahead: the step must "
                "compute the same inputs whenever it is given the same batch"
            )
        new = [
            (n, b, s) for n, (b, s) in enumerate([(batch, step), *ahead], number)
            if n not in self._inputs
        ]  # fmt: skip
        word, most = self.stop.next_word(), self._programs.announced
        for n, following, its_step in new:
            if n == number:
                self._inputs[n] = own
            else:
                made = self._runner.inputs(its_step, following, self._seed + n, effects=False)
                kept = self._kept_of(n, following, made)
                self._inputs[n] = made if kept is None else kept.select(made)
            said = word if n == number + most else ""
            self.announcements.tell(n, self._described(n, following, kept), said)
            if self._programs.tells_early:
                fields = self.captured.plan.batch_fields
                ranks = self.pipeline.loss_ranks
                send_fields(following, fields, self.transport, Channel.EARLY_FIELDS, ranks)
        if len(ahead) < most:
            self.announcements.tell(number + len(ahead) + 1, None, word)
        self.executor.recorder.ran(number, Action(Op.DATA, self.rank), started)
        return own

    def _described(self, number: int, batch: Any, kept: Kept | None = None) -> StepHeader:
        """On the data rank: what the others are told of a batch whose call inputs are made."""
        inputs, front = self._inputs[number], self._front
        samples = None if front is None else front.see(batch, inputs)
        return StepHeader.of(batch, inputs, samples=samples, kept=kept)

    @property
    def _replays_all(self) -> bool:
        """Whether what a step does on this rank is what its replay does, and nothing else.

        Where there are heads, a rank that trains none has nothing to do in a step.
        """
        return self.heads is not None and not self.captured.plan.has_effects

    def _kept_of(self, number: int, batch: Any, inputs: Sequence[Tensor]) -> Kept | None:
        """On the data rank: what is known of a batch's features, decided once."""
        if number in self.announcements:
            return self.announcements[number].kept
        cache = None if self.heads is None else self.heads.cache
        return None if cache is None else cache.see(batch, inputs)

    def _exchange_fields(self, header: StepHeader, batch: Any) -> Receipt | None:
        """Send the fields that the loss reads (data rank), or ask for them (loss rank)."""
        if self._programs.tells_early:
            return self.announcements.companion(self._index)
        fields, data_rank = self.captured.plan.batch_fields, self.placement.data_rank
        return header.exchange_fields(
            fields, batch, self.transport, data_rank, Channel.EARLY_FIELDS, self.pipeline.loss_ranks
        )

    def _output(self, call: int, ref: ValueRef) -> Tensor:
        if self._step is None:
            raise CaptureError(
                f"the step calls a pipelined network at {current_line()}, after an optimizer made "
                "use of the gradients of the calls before: a batch goes through the pipeline once, "
                "there and back. Make all calls before the first optimizer.step, or update one "
                "network per batch, as in `if batch_idx % 2 == 0: opt_a.step()`"
            )
        kept = self.announcements[self._index].kept
        if kept is not None:
            return self._feature(kept, call, ref)
        tensor = self.executor.output(self._step, call, ref)
        units = self._step.units[0].units[self.captured.plan.calls[call].network]
        spec = next(u.shapes.outputs[ref] for u in units if u.call == call and u.shapes is not None)
        if spec.requires_grad and torch.is_grad_enabled():
            tensor.requires_grad_()
            self._leaves[call, ref] = tensor
        return tensor

    def _feature(self, kept: Kept, call: int, ref: ValueRef) -> Tensor:
        """One of the features of a batch of which some were known."""
        if not self._features:
            assert self.heads is not None
            assert self.heads.cache is not None
            assert self._step is not None
            values = self._lookahead.values
            computed = [self.executor.output(self._step, *value) for value in values if kept.rows]
            whole = self.heads.cache.whole(kept, computed, self.device)
            self._features = dict(zip(values, whole, strict=True))
        return self._features[call, ref]

    def backward(self, run_backward: Callable[[], None] | None, *, reduce: bool = True) -> None:
        """The part of a step after the loss.

        Args:
            run_backward: On the loss rank, the backward of the loss.
            reduce: Whether an update follows: gradients become the means over the replicas.
        """
        context = self._step
        assert context is not None
        self._note_replay()
        if self.computes_loss:
            assert run_backward is not None
            started = time.perf_counter()
            run_backward()
            for call in self.captured.plan.calls_of("student"):
                gradients = {ref: t.grad for (c, ref), t in self._leaves.items() if c == call}
                self.executor.scatter_gradient(context, call, gradients)
            self._leaves = {}
            self._note_loss(Op.BACKWARD, started)
            self.executor.send(context, Action(Op.LOSS, self.rank))
        run = partial(self.executor.run, context)
        if reduce and self._reduction is not None:
            self._reduction.run(self._rest_actions, run, self.executor.recorder)
        else:
            run(self._rest_actions)
        self.executor.finish(context)
        if reduce and self.weights is not None:
            self.weights.keep()
        self._lookahead.done(self._index, context.units)
        self.announcements.forget(self._index)
        self._inputs.pop(self._index, None)
        self._features = {}
        self._index += 1
        self._step = None

    def run_ahead(self, step: Step, batch: Any) -> None:
        """The teacher's calls of the coming step, now; every rank calls it before that step.

        Args:
            step: The step, a function of the batch.
            batch: The batch, on the data rank.
        """
        number = self._index
        if self.is_data_rank:
            made = self._runner.inputs(step, batch, self._seed + number, effects=False)
            self._inputs[number] = made
            self.announcements.tell(number, self._described(number, batch))
        self.announcements.await_batches(number, number)
        header, program = self.announcements[number], lower(teacher_only(self.pipeline))
        if self._front is not None:
            self._front.expect({number: header.samples})
        units = self._units(header)
        context = StepContext(number - 1, program, {1: units})
        self.executor.post_receives(context)
        if self.is_data_rank:
            context.inputs[1] = self._inputs[number]
            self.executor.send_inputs(context, 1)
        self.executor.run(context, program.schedule.ranks[self.rank])
        self.executor.finish(context)
        self._lookahead.done(number - 1, {1: units})

    def note_optimizer(self, started: float) -> None:
        """The optimizer step of this rank ended; one beside the losses belongs to their time."""
        if self._step is None:
            self.executor.recorder.ran(self._index - 1, Action(Op.OPTIMIZER, self.rank), started)
