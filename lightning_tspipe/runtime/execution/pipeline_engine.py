"""The engine of a pipeline, step after step.

One step, whose second half the caller begins with the backward of the loss::

    forward(step, batch, ahead):  effects, data | student forwards, teacher forwards | loss
    backward(run_backward):       backward of the loss | backwards, teacher forwards ahead

Where student forwards run ahead too (``1f1b``), they are in the first half. All that is computed is
an action of a validated schedule, which the executor runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError, ConfigurationError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.late import Late
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.batches.metadata import StepHeader
from lightning_tspipe.runtime.execution.engine import Engine, Rank, Stopped
from lightning_tspipe.runtime.execution.executor import StepContext
from lightning_tspipe.runtime.execution.in_flight import InFlight
from lightning_tspipe.runtime.execution.intake import BatchAndStep, Intake, Programs
from lightning_tspipe.runtime.execution.teacher_ahead import Allowed, TeacherAhead
from lightning_tspipe.runtime.stages.captured import Captured, StepUnits
from lightning_tspipe.runtime.stages.watched import Watched
from lightning_tspipe.runtime.transport.channels import Lane, edges_from
from lightning_tspipe.runtime.transport.replicas import REST, GradientReduction
from lightning_tspipe.runtime.weights import gradient_hooks
from lightning_tspipe.runtime.weights.materializing import Materializer
from lightning_tspipe.runtime.weights.policies import WeightPolicy
from lightning_tspipe.runtime.weights.prediction import TeacherPrediction
from lightning_tspipe.runtime.weights.still import read_by_teacher, still
from lightning_tspipe.runtime.weights.tied import TiedGradients
from lightning_tspipe.runtime.weights.versions import StageWeights
from lightning_tspipe.schedules.phases import teacher_only
from lightning_tspipe.schedules.window_steps import Durations, WindowSteps
from lightning_tspipe.simulation.cost import CostTable

_SECOND_HALF = frozenset({Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD, Op.OPTIMIZER})


class PipelineEngine(Engine):
    """One rank of a pipeline.

    Args:
        here: This rank.
        captured: What :meth:`Rank.capture` found.
        placement: Who gets what.
        schedule: ``tspipe``, ``gpipe``, ``sequential`` or ``1f1b``.
        costs: Costs of the stages, for the order of actions; None for equal ones.
        materializer: Where the values come from, of a module that has none; it stays spread.
        policy: Which version of the weights is read, with ``1f1b``.
        allowed: In windows, that a teacher may run ahead of updates; None: it may not.

    Attributes:
        tells_lost: Whether the loss rank tells in each step on what the loss does not depend.

    Raises:
        PartitionError: The cuts separate what has to be in one stage.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - everything that decides who does what
        self,
        here: Rank,
        captured: Captured,
        placement: Placement,
        schedule: str,
        costs: CostTable | None = None,
        materializer: Materializer | None = None,
        policy: WeightPolicy | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        # With several versions of the weights, ranks update at different times.
        drains = policy is None or policy.is_synchronous
        super().__init__(here, captured, placement, materializer, ties=drains)
        pipeline = self.pipeline
        self._teacher_ahead = self._ahead_of_updates(allowed)
        steps: WindowSteps | None = None
        if allowed is not None and self._teacher_ahead is not None:
            durations = Durations.of(schedule, pipeline, costs)
            steps = WindowSteps(
                schedule, pipeline, allowed.runs, allowed.longest, durations, placement.split
            )
        self._programs = Programs(pipeline, schedule, costs, placement, steps)
        self.lookahead = self._programs.announced
        edges = self._programs.edges
        edges |= edges_from(placement.data_rank, pipeline.loss_ranks, Lane.EARLY_FIELDS)
        own = self.shards.by_stage(self.rank)
        self._reduction: GradientReduction | None = None
        self._tied = TiedGradients(self.shards.tied, self.transport, defers=policy is not None)
        self._lost_of = cache(captured.lost)
        # By hand, only the step knows what it runs a backward of.
        is_known = getattr(self.module, "automatic_optimization", True)
        loses = not is_known or bool(self._lost_of(captured.plan.reached))
        self.tells_lost = not here.replicas.all_say(not loses)
        if here.replicas.number > 1:
            self._reduction = GradientReduction(own, here.replicas.peers, self.recorder)
            self._tied.average(here.replicas.peers, self.recorder)
        self.transport.open(edges | self._tied.edges)
        self.losses = self.prepare(captured, pipeline, self.mode, trains=True)
        self.stages, self._runner = self.losses.stages, self.losses.runner
        self.stages.handlers[Op.EFFECTS] = self._effects
        self.stages.read = self._read
        if policy is not None:
            trained = [p for stage in own.keys() - {REST} for p in own[stage] if p.requires_grad]
            others = still(captured) if policy.is_synchronous else ()
            self.weights = StageWeights(
                policy, self.rank, self.transport.num_ranks, self.module, trained, others
            )
            self.stages.use_versions(Op.FORWARD, self.weights)
        self.intake = Intake(self, self._programs, self._runner)
        # What makes inputs of a student that reads its teacher comes before the loss.
        self._ends = (_SECOND_HALF | self.losses.handlers.keys()) - {Op.PROLOGUE}
        self._pace = self.mode.pace(self.transport, pipeline, placement)
        # Between two steps, as in a checkpoint, no rank may wait for what another one asks for in
        # a later step.
        slack = 0 if self._pace is None else self._pace.slack + 1
        self.transport.steps_under_way = max(1, self._programs.steps_early, slack)
        self._in_flight = InFlight(self, self.stages, self._teacher_ahead)
        self._teacher_before: dict[str, Any] | None = None
        self._step: tuple[Step, StepHeader, StepContext] | None = None
        self._version: object = None  # of the networks, in this step
        self._late: dict[NetworkName, object] = {}
        self._checked: object = None
        # What runs ahead, and reads what it finds then.
        self._early = {
            name: Watched(network.modules)
            for name, network in captured.networks.items()
            if self._runs_early(name, policy)
        }
        self._rest: Sequence[Action] = ()
        self._behind: dict[int, StepUnits] = {}
        """Batches whose losses have run and whose backwards have not ended."""
        self._without: set[str] | None = None
        """Parameters without gradients before these, on which none of their losses depends."""

    def _read(self, action: Action) -> tuple[int, int] | tuple[()]:
        """The version of the weights that an action has read, and the updates predicted on it."""
        read = None if self.weights is None else self.weights.last
        if read is None or action.op not in {Op.FORWARD, Op.BACKWARD}:
            return ()
        return read.version, read.predicted

    @property
    def outputs(self) -> list[Tensor]:
        """On the loss rank: what the step's calls gave so far, where gradients are wanted."""
        return list(self.losses.leaves.values())

    # A step

    def forward(
        self,
        step: Step,
        batch: Any,
        ahead: Sequence[BatchAndStep] = (),
        *,
        replay: Step | None = None,
        before_update: Sequence[int] = (0, 0),
    ) -> Any:
        """The part of a step up to the loss.

        Args:
            step: The step, a function of the batch.
            batch: The batch, on the data rank.
            ahead: On the data rank, the next batches and their steps, as far as they may be worked
                on now, and up to :attr:`lookahead` of them. They are the batches of the next calls,
                unless :meth:`drain` is called on all ranks.
            replay: What runs on the loss rank in place of ``step``, with the real outputs; it may
                call :meth:`backward` itself, while the replay is suspended.
            before_update: How many of the next batches come before an update, and before the one
                behind it, where a teacher may run ahead of updates.

        Returns:
            On a rank with a loss what the step returns, elsewhere None.
        """
        if self._pace is not None:
            self._pace.tell()
            self._pace.wait()
        context, header = self._open_step(step, batch, ahead, before_update)
        self._step = step, header, context
        self.batch_size = header.batch_size
        run = partial(self.stages.run, context)
        scheduled = context.program.ranks[self.rank]
        run(action for action in scheduled if action.op is Op.DATA)
        self.stages.post_receives(context)
        run(action for action in scheduled if action.op is Op.EFFECTS)
        for stage in self.stages:  # what ran ahead for this batch counts now
            stage.commit_ahead(self._index)
        actions = [action for action in scheduled if action.op not in {Op.DATA, Op.EFFECTS}]
        stop = next(i for i, action in enumerate(actions) if action.op in self._ends)
        # The first that reads the teacher as this step leaves it behind.
        late = next(
            (i for i, a in enumerate(actions[:stop]) if a.op is Op.TEACHER and a.batch), stop
        )
        # What reads the teacher of a later step comes behind the hooks between the two halves.
        through = late if replay is None else stop
        through = next((i + 1 for i, a in enumerate(actions) if a.op is Op.LOSS), through)
        self._rest = actions[through:]
        seed = self._seed + self._index
        fields = self.intake.fields(header, batch)
        context.replay = replay or step, fields, seed, header.fingerprints
        context.prologue = partial(self._runner.inputs, step, batch, seed, effects=True)
        run(actions[:late])
        if self.captured.plan.has_late_effects:
            assert not any(a.op is Op.TEACHER and not a.batch for a in actions[late:]), actions
            self._runner.late_effects(step, header.batch(), seed)
        run(actions[late:through])
        return context.result

    def _effects(self, context: StepContext, _: Action) -> bool:
        """What the step does to this rank's parameters before its last call."""
        if self.is_data_rank:
            return False  # they happened when the batch was told of
        if self.captured.plan.has_effects:
            assert self._step is not None
            step, header = self._step[:2]
            self._runner.effects(step, header.batch(), self._seed + context.index)
        return True

    def _open_step(
        self, step: Step, batch: Any, ahead: Sequence[BatchAndStep], before_update: Sequence[int]
    ) -> tuple[StepContext, StepHeader]:
        """Tell of the batches, or hear of them, and choose the program."""
        number, intake = self._index, self.intake
        headers = intake.open(step, batch, ahead)
        self._version = version = intake.version()
        units = {n - number: intake.units(header, version) for n, header in headers.items()}
        flight = self._in_flight
        has_begun = flight.begin(number, units[0])
        # One that doesn't change is not late.
        is_late = self._teacher_ahead is None or self.teacher_is_late
        self.teacher_ran_ahead = has_begun and is_late
        if version != self._checked:
            self._check_trained()
            self._checked = version
        # Nothing is known of before if it ran ahead in another run.
        before, self._late = self._late, {name: self._read_early(name) for name in self._early}
        now = dict(self._late)
        if self.weights is not None and self.weights.is_drained:
            now = {"teacher": now.get("teacher")}  # ahead of an update
        if has_begun and any(before.get(name, read) != read for name, read in now.items()):
            raise CaptureError(
                "a hook has changed an attribute of a network (its mode, say), or what of a "
                "forward-only one is to be trained, after the network has run ahead for this "
                "batch. Change it in on_train_epoch_start, in windows of accumulated batches "
                "behind any update, or use TSPipeStrategy(schedule='gpipe'), which does nothing a "
                "step early"
            )
        known = len(headers) - 1
        within, beyond = known, 0
        if self._programs.lets_ahead:
            within, further = (min(known, number) for number in before_update)
            beyond = further - within
        program, flight.progress = self._programs.of(flight.progress, within, beyond)
        if self._teacher_ahead is not None:
            self._teacher_ahead.check(program, within)
        units |= {n - number: behind for n, behind in self._behind.items()}
        context = StepContext(number, program, units, intake.inputs(headers, number))
        flight.read_back(context)
        return context, headers[number]

    def _runs_early(self, name: NetworkName, policy: WeightPolicy | None) -> bool:
        """Whether a network runs ahead and must be then what it is in the step of its batch."""
        is_whole = policy is not None and policy.is_synchronous
        return bool(self.lookahead) and (is_whole or name == "teacher")

    def _read_early(self, name: NetworkName) -> object:
        """What a network is that runs ahead; a student may be frozen meanwhile."""
        routes = self.captured.networks[name].routes
        read = tuple(each.version if name == "teacher" else each.recorded for each in routes)
        return read, self._early[name].number

    def _ahead_of_updates(self, allowed: Allowed | None) -> TeacherAhead | None:
        """What decides whether a teacher runs ahead of updates; None where none can."""
        # On one device none waits; but one may be late.
        is_alone = self.pipeline.num_ranks == 1
        if allowed is None or (is_alone and allowed.late_from is None):
            return None
        if "teacher" not in self.captured.networks:
            return None
        return TeacherAhead(
            partial(read_by_teacher, self.captured), partial(self._read_early, "teacher"),
            lambda holds: all(self.transport.gather_everywhere(holds)), self._check_later,
            allowed.late_from,
            tells=self.is_loss_rank and self.here.replicas.is_first,
        )  # fmt: skip

    def _check_later(self, verdict: Late, judge: Callable[[Any], None]) -> None:
        assert self.weights is not None
        self.weights.check_later(verdict, judge)

    def begin_window(self, updates: int, *, is_drained: bool) -> None:
        """A window begins: whether the teacher runs ahead of the next update; every rank calls it.

        Args:
            updates: How many there were.
            is_drained: Whether nothing has run ahead of its batches.
        """
        ahead = self._teacher_ahead
        if ahead is not None and ahead.begin(updates, is_drained=is_drained):
            self.drain()

    def come_to(self, position: int, every: int) -> None:
        """Before a step whose weights have versions.

        Args:
            position: The place of its batch in its epoch.
            every: Batches per update.
        """
        assert self.weights is not None
        self.weights.batches_per_update, self.weights.position = every, position
        self._programs.every = every
        self._programs.lets_ahead = self._teacher_ahead is not None and self._teacher_ahead.lets
        self.lookahead = self._programs.announced

    @property
    def teacher_is_late(self) -> bool:
        """Whether the teacher is one update late, in whole windows."""
        return self._teacher_ahead is not None and self._teacher_ahead.late_from is not None

    @override
    def lacks_late_teacher(self, updates: int) -> bool:
        start = None if self._teacher_ahead is None else self._teacher_ahead.late_from
        return start is not None and updates >= start and not self._in_flight.goes_on

    @property
    def lets_ahead(self) -> bool:
        """Whether a teacher runs ahead of updates now."""
        return self._programs.lets_ahead

    def leave(self) -> None:
        """Where a window begins: another engine takes the place of this one; on every rank."""
        if self._programs.lets_ahead:
            self.drain()
            self.intake.flush()

    def _check_trained(self) -> None:
        """What nothing was to be trained of when the step was captured has no backward.

        Raises:
            CaptureError: Something is to be trained by now.
        """
        call = self.captured.begins_to_train
        if call is not None:
            raise self._runner.begins_to_train(call)

    @override
    def backward(self, run_backward: Callable[[], None] | None, *, reduce: bool = True) -> None:
        assert self._step is not None
        _, _, context = self._step
        run = partial(self.stages.run, context)
        if self._without is None:
            parameters = self.module.named_parameters() if self.tells_lost else ()
            self._without = {name for name, own in parameters if own.grad is None}
        hooked = self._run_backward(run, run_backward, reduce=reduce)
        lost = self._lost() if self.is_loss_rank else []
        if self.tells_lost:
            self._without &= set(self.transport.broadcast_object(lost, LOSS_RANK))
        if self.computes_loss and self._version != self.intake.version():
            raise self._runner.changed()
        self._finish(context)
        if hooked:
            self._check_hooked()
            gradient_hooks.run_late_hooks(hooked)
        self._leave_out()
        if reduce and self.weights is not None:
            self.weights.keep()
        self.intake.forget(self._index)
        self.losses.done()
        self._index += 1
        self._step = None

    def _run_backward(
        self,
        run: Callable[[Sequence[Action]], None],
        run_backward: Callable[[], None] | None,
        *,
        reduce: bool,
    ) -> list[nn.Parameter]:
        """All of a backward; which parameters have hooks of their own."""
        reduction = self._reduction if reduce else None
        hooked, rest = gradient_hooks.hooked(self.module.parameters()), self._rest
        with self._tied.summed(reduce=reduce):
            with gradient_hooks.whole_gradients(hooked, self._tied.own):
                if self.computes_loss:
                    assert run_backward is not None
                    self.losses.prepare_backward(run_backward)
                    run((Action(Op.LOSS, self.rank),))
                if hooked or reduction is None:
                    run(rest)
                    rest = ()
            if reduction is not None:  # of what hooks have made of them
                reduction.run(rest, run)
        return hooked

    def _check_hooked(self) -> None:
        if self._behind or (self.weights is not None and not self.weights.policy.is_synchronous):
            raise ConfigurationError(
                "a parameter has a hook on its gradient (register_hook), which is to get that of a "
                "batch: with this schedule backwards of a batch end in later steps, or read other "
                "versions of it. Use schedule='tspipe' or 'gpipe', or do it in "
                "on_before_optimizer_step"
            )

    def _leave_out(self) -> None:
        """What no loss depends on has no gradient; zeros came back to it from the losses."""
        if not self._behind:
            for name in self._without or ():
                self.module.get_parameter(name).grad = None
            self._without = None

    def _lost(self) -> list[str]:
        """On the loss rank: the parameters on which the loss did not depend, for any replica.

        Raises:
            CaptureError: There are some, and other ranks don't expect to be told.
        """
        plan, reached = self.captured.plan, self.losses.reached
        lost = set() if plan.trained <= reached else self._lost_of(reached)
        named = self.module.named_parameters() if lost else ()
        # Those with which the step computes have gradients of the loss itself.
        names = [name for name, own in named if own in lost and name not in plan.parameters]
        if names and not self.tells_lost and self.pipeline.student.num_stages > 1:
            raise CaptureError(
                f"the loss of this step does not depend on {names[0]!r}, on which it depended in "
                "the step that was traced. On one device it would have no gradient, and an "
                "optimizer would leave it out; other ranks don't know that. Let the epoch, "
                "self.global_step or batch_idx decide, or multiply by 0 what is not to count"
            )
        if not self.tells_lost:
            return []
        every = self.here.replicas.gather(names)
        return [name for name in names if all(name in each for each in every)]

    def _finish(self, context: StepContext) -> None:
        """Forget what belongs to a step, and wait until what it sent has left."""
        left, _ = self._programs.rest(self._in_flight.progress)
        offsets = {action.batch for action in left.actions if action.unit is not None}
        behind = {context.index + offset: context.units[offset] for offset in offsets}
        for number in {*self._behind, context.index} - behind.keys():
            if self.weights is not None:
                self.weights.trained(number)
        self._behind = behind
        self.stages.finish(min(behind, default=context.index + 1) - 1)
        units, progress = context.units, self._in_flight.progress
        if self._programs.lets_ahead and not progress.place:  # behind a window
            units = {place + 1: units[place + 1] for place in progress.begun}
        self._in_flight.done(context.index, units)

    def _end_backwards(self) -> None:
        """Between two steps: run all backwards whose losses have run; every rank calls it."""
        if not self._behind:
            return
        program, self._in_flight.progress = self._programs.rest(self._in_flight.progress)
        last, units = self._index - 1, self._in_flight.units
        behind = {number - last: units for number, units in self._behind.items()}
        context = StepContext(last, program, behind)
        self.stages.post_receives(context)
        self.stages.run(context, (a for a in program.ranks[self.rank] if a.unit is not None))
        self._finish(context)
        self._in_flight.units = units
        self._leave_out()

    @property
    @override
    def gradients_are_partial(self) -> bool:
        return bool(self._behind)

    @override
    def run_ahead(self, step: Step, batch: Any) -> None:
        number = self._index
        header = self.intake.open_one(step, batch)
        program, headers = teacher_only(self.pipeline), {number: header}
        inputs = self.intake.inputs(headers, number - 1)
        units = {1: self.intake.units(header, self.intake.version())}
        context = StepContext(number - 1, program, units, inputs)
        self.stages.post_receives(context)
        self.stages.run(context, program.ranks[self.rank])
        self._finish(context)

    @override
    def note_optimizer(self, started: float) -> None:
        if self._step is None:
            self.recorder.ran(self._index - 1, Action(Op.OPTIMIZER, self.rank), started)

    # Between two steps

    @override
    def predict_teacher(self) -> None:
        teacher = self.captured.networks.get("teacher")
        if teacher is None or self.prediction is not None:
            return
        self.prediction = TeacherPrediction(teacher.blocks, self._teacher_before)
        self.stages.use_versions(Op.TEACHER, self.prediction)

    @override
    def flights(self) -> dict[str, Any] | None:
        return self._in_flight.write()

    @override
    def settle(self, *, keeps_flights: bool = False) -> None:
        self._end_backwards()
        self._tied.settle()
        if not keeps_flights and self.weights is not None and self._in_flight.units:
            self._in_flight.drop()

    @override
    def ahead(self) -> dict[str, Any] | None:
        return self._in_flight.teacher_ahead(self._index) if self.mode.saves_lookahead else None

    @override
    def resume(self, stopped: Stopped) -> None:
        super().resume(stopped)
        self._in_flight.resume(stopped.ahead, stopped.in_flight)
        self._teacher_before = stopped.teacher_before

    @override
    def drain(self) -> None:
        self._end_backwards()
        self._in_flight.drop()
        self.intake.drop()
