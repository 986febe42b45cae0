"""One rank's part in training: traces the step, places the networks, runs step after step.

The engine knows nothing of Lightning: ``strategy`` calls it from Lightning's hooks, tests call it
from threads. One step::

    forward(step, batch, ahead):  effects, data | student forwards, teacher forwards | loss
    backward(loss, run):          backward of the loss | backwards, teacher forwards ahead
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.location import current_line
from lightning_tspipe.capture.plan import NetworkName, TensorSpec, ValueRef
from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Networks, Step, Tracer
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import lower
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.networks.compiling import Compiler
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.ahead import Ahead, Lookahead
from lightning_tspipe.runtime.execution import Execution
from lightning_tspipe.runtime.executor import BATCH_CHANNEL, Executor, StepContext
from lightning_tspipe.runtime.header import StepHeader
from lightning_tspipe.runtime.materializing import Materializer
from lightning_tspipe.runtime.network import ChainNetwork
from lightning_tspipe.runtime.programs import Captured, Programs, layout
from lightning_tspipe.runtime.reduction import GradientReduction
from lightning_tspipe.runtime.replicas import Replicas
from lightning_tspipe.runtime.stopping import Stop
from lightning_tspipe.runtime.transport import Transport
from lightning_tspipe.runtime.units import StepUnits
from lightning_tspipe.runtime.weights import LOSS_RANK, Shards, forget_graphs
from lightning_tspipe.schedules.phases import teacher_only
from lightning_tspipe.simulation.cost import CostTable

_BACKWARDS = frozenset({Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD, Op.OPTIMIZER})

BatchAndStep = tuple[Any, Step]


def _is_ahead(action: Action) -> bool:
    """Whether it reads the teacher as this step leaves it behind."""
    return action.op is Op.TEACHER and action.batch == 1


class Engine:
    """One rank of the pipeline.

    Args:
        module: The module that has the networks.
        networks: Their names.
        transport: How to reach the other ranks.
        device: Where this rank computes.
        seed: Seed of the steps' random streams, the same on all ranks.
        forward_context: The precision plugin's forward context.
        replicas: The other pipelines that train the same networks on other batches.
        compiler: Compiles what stages run.

    Attributes:
        stop: Whether the ranks were asked to stop.
        batch_size: Samples of the current step's largest call.
        teacher_ran_ahead: Whether the teacher of the current step ran in the step before.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank
        self,
        module: nn.Module,
        networks: Networks,
        transport: Transport,
        device: torch.device,
        seed: int = 0,
        forward_context: Callable[[], AbstractContextManager[None]] = nullcontext,
        replicas: Replicas | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.module = module
        self.transport = transport
        self.rank = transport.rank
        self.names = networks
        self.device = device
        self.context = forward_context
        self._replicas = replicas or Replicas()
        self._reduction: GradientReduction | None = None
        self.compiler = compiler
        self.materializer: Materializer | None = None
        self.stop = Stop()
        self._seed = seed
        self._index = 0
        self._known_units: dict[tuple[TensorSpec, ...], StepUnits] = {}
        self._step: StepContext | None = None
        self._leaves: dict[tuple[int, ValueRef], Tensor] = {}
        self._rest_actions: Sequence[Action] = ()
        self._replay_started: float | None = None
        self.batch_size = 1
        self.teacher_ran_ahead = False

    @property
    def outputs(self) -> list[Tensor]:
        """On the loss rank: what the step's calls gave so far, where gradients are wanted."""
        return list(self._leaves.values())

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank computes the loss."""
        return self.rank == LOSS_RANK

    @property
    def is_data_rank(self) -> bool:
        """Whether this rank reads the data."""
        return self.rank == self.placement.data_rank

    def capture(self, step: Step, batch: Any, *, training: bool = True) -> Captured:
        """Trace a step on its first batch; all ranks do it, with the same batch.

        Args:
            step: The step, a function of the batch.
            batch: The batch.
            training: Whether it takes part in a backward; without one, it may call parts of the
                networks too.

        Raises:
            CaptureError: The step can't be captured.
        """
        forget_graphs(self.module)  # before copies of attributes hold on to them
        tracer = Tracer(self.module, self.names, self.device, parts=not training)
        with nullcontext() if training else torch.no_grad():
            plan = tracer.trace(step, batch, self._seed)
            runner = StepRunner(self.module, self.names, plan, is_loss_rank=self.is_loss_rank)
            runner.late_effects(step, batch, self._seed, rehearsal=True)
        networks = {
            name: ChainNetwork(name, self.module, plan, self.device) for name in plan.chains
        }
        return Captured(plan, networks)

    def place(
        self,
        captured: Captured,
        placement: Placement,
        schedule: str,
        costs: CostTable | None,
        materializer: Materializer | None = None,
    ) -> None:
        """Cut the networks, keep this rank's stages, and build the schedules.

        Args:
            captured: What :meth:`capture` found.
            placement: Who gets what.
            schedule: ``tspipe``, ``gpipe`` or ``sequential``.
            costs: Costs of the stages, for the order of actions; None for equal ones.
            materializer: Where the values come from, of a module that has none; it stays spread.

        Raises:
            PartitionError: The cuts separate a tied parameter.
        """
        self.captured = captured
        self.placement = placement
        plan, networks = captured.plan, captured.networks
        self.cuts: dict[NetworkName, tuple[int, ...]] = {"student": placement.student_cuts}
        self.ranks: dict[NetworkName, tuple[int, ...]] = {"student": placement.student_ranks}
        if "teacher" in networks:
            self.cuts["teacher"] = placement.teacher_cuts
            self.ranks["teacher"] = placement.teacher_ranks
        for name, network in networks.items():
            network.check_cuts(self.cuts[name])
        self.pipeline = layout(
            captured, self.ranks, self.cuts, placement.num_microbatches, self.transport.num_ranks
        )
        self._programs = Programs(self.pipeline, schedule, costs, placement.split)
        self.shards = Shards(self.module, networks, self.cuts, self.ranks)
        self.materializer = materializer
        if materializer is not None:
            materializer.fill(partial(self.shards.holds, rank=self.rank))
            self.shards.stays_spread = True
        self.shards.place(self.rank, self.device)
        if self._replicas.number > 1:
            trained = self.shards.by_stage(self.rank)
            self._reduction = GradientReduction(trained, self._replicas.peers)
        self._runner = StepRunner(self.module, self.names, plan, is_loss_rank=self.is_loss_rank)
        statistics = {
            name: DeferredStatistics(
                [self.module.get_submodule(block) for block in network.block_names]
            )
            for name, network in networks.items()
        }
        self.executor = Executor(
            self.transport,
            networks,
            statistics,
            self.context,
            self.device,
            self._executions(networks, statistics),
        )
        self._lookahead = Lookahead(
            self.module, plan, self.executor, is_loss_rank=self.is_loss_rank
        )

    def _executions(
        self,
        networks: dict[NetworkName, ChainNetwork],
        statistics: dict[NetworkName, DeferredStatistics],
    ) -> dict[NetworkName, Execution]:
        """How the networks' atoms run, where not simply as they are."""
        again = {"student": self.placement.recomputed}
        return {
            name: Execution(
                network.compiled_chain(self.compiler),
                {block: self.module.get_submodule(block) for block in network.block_names},
                statistics[name],
                again.get(name, ()),
            )
            for name, network in networks.items()
            if self.compiler is not None or again.get(name)
        }

    def forward(
        self,
        step: Step,
        batch: Any,
        ahead: BatchAndStep | None,
        *,
        continues: bool | None = None,
        replay: Step | None = None,
    ) -> Any:
        """The part of a step up to the loss.

        Args:
            step: The step, a function of the batch.
            batch: The batch, on the data rank.
            ahead: On the data rank, the next batch and its step, if its teacher is to run ahead.
            continues: On the data rank, whether this is the batch that was ahead in the step
                before; if not, what ran ahead is dropped. None: whatever was ahead is this batch.
            replay: What runs on the loss rank in place of ``step``, with the real outputs; it may
                call :meth:`backward` itself, within :meth:`suspended`.

        Returns:
            On the loss rank what the step returns, elsewhere None.
        """
        recorder = self.executor.recorder
        header, inputs = self._exchange(step, batch, ahead, continues=continues)
        self.stop.hear(header.stop)
        if not header.continues:
            self.drain()
        self._lookahead.begin(self._index, self._units(header.inputs))
        self.teacher_ran_ahead = self._lookahead.units is not None
        context = self._open_step(header, inputs)
        self._step = context
        self.batch_size = max(spec.shape[0] for spec in header.inputs)
        executor = self.executor
        executor.post_receives(context)
        if not self.is_data_rank:
            started = time.perf_counter()
            self._runner.effects(step, header.batch(), self._seed + self._index)
            recorder.ran(self._index, Action(Op.EFFECTS, self.rank), started)
        executor.statistics.commit_ahead()
        actions = context.program.schedule.ranks[self.rank]
        stop = next(i for i, action in enumerate(actions) if action.op in _BACKWARDS | {Op.LOSS})
        plan = self.captured.plan
        started = time.perf_counter()
        fields = header.exchange_fields(
            plan.batch_fields, batch, self.transport, self.placement.data_rank, BATCH_CHANNEL
        )
        recorder.paused("send", started)
        late = next(i for i, action in enumerate(actions) if i == stop or _is_ahead(action))
        executor.run(context, actions[:late])
        if plan.has_late_effects:
            assert not any(a.op is Op.TEACHER and not a.batch for a in actions[late:]), actions
        self._runner.late_effects(step, header.batch(), self._seed + self._index)
        executor.run(context, actions[late:stop])
        self._rest_actions = actions[stop:]
        if actions[stop].op is not Op.LOSS:
            return None
        executor.await_outputs(context, actions[stop])
        whole = batch
        if not self.is_data_rank:
            started = time.perf_counter()
            whole = header.batch(plan.batch_fields, fields)
            recorder.paused("receive", started)
        self._leaves = {}
        self._replay_started = time.perf_counter()
        seed = self._seed + self._index
        result = self._runner.replay(replay or step, whole, seed, self._output)
        self._note_replay()
        return result

    def _note_replay(self) -> None:
        """The loss is there."""
        if self._replay_started is not None:
            loss = Action(Op.LOSS, self.rank)
            self.executor.recorder.ran(self._index, loss, self._replay_started)
            self._replay_started = None

    def suspended(self) -> AbstractContextManager[None]:
        """While inside, a replay that calls this is as good as over: the networks are at hand."""
        return self._runner.suspended()

    def _exchange(
        self, step: Step, batch: Any, ahead: BatchAndStep | None, *, continues: bool | None
    ) -> tuple[StepHeader, dict[int, tuple[Tensor, ...]]]:
        """On the data rank: find the call inputs and announce them; elsewhere: hear of them."""
        started = time.perf_counter()
        if not self.is_data_rank:
            header = StepHeader.receive(self.transport, self.placement.data_rank)
            self.executor.recorder.paused("receive", started)
            return header, {}
        seed = self._seed + self._index
        inputs = {0: self._runner.inputs(step, batch, seed, effects=True)}
        if ahead is not None:
            inputs[1] = self._runner.inputs(ahead[1], ahead[0], seed + 1, effects=False)
        was_ahead = self._lookahead.is_there(inputs[0])
        header = StepHeader.of(
            batch, inputs[0], inputs.get(1),
            continues=was_ahead if continues is None else was_ahead and continues,
            stop=self.stop.next_word(),
        )  # fmt: skip
        header.send(self.transport)
        self.executor.recorder.ran(self._index, Action(Op.DATA, self.rank), started)
        return header, inputs

    def _open_step(self, header: StepHeader, inputs: dict[int, tuple[Tensor, ...]]) -> StepContext:
        has_teacher = self.pipeline.teacher is not None
        program = self._programs.of(
            teacher_now=has_teacher and self._lookahead.units is None,
            teacher_next=has_teacher and header.ahead is not None,
        )
        units = {0: self._units(header.inputs)}
        if header.ahead is not None:
            units[1] = self._units(header.ahead)
        context = StepContext(self._index, program, units, inputs)
        if self.is_data_rank:
            for offset in inputs:
                self.executor.send_inputs(context, offset)
        return context

    def _units(self, inputs: tuple[TensorSpec, ...]) -> StepUnits:
        if inputs not in self._known_units:
            self._known_units[inputs] = StepUnits(
                self.captured.plan,
                self.captured.networks,
                self.cuts,
                self.placement.num_microbatches,
                inputs,
                self.context,
            )
        return self._known_units[inputs]

    def _output(self, call: int, ref: ValueRef) -> Tensor:
        if self._step is None:
            raise CaptureError(
                f"the step calls a pipelined network at {current_line()}, after an optimizer made "
                "use of the gradients of the calls before: a batch goes through the pipeline once, "
                "there and back. Make all calls before the first optimizer.step, or update one "
                "network per batch, as in `if batch_idx % 2 == 0: opt_a.step()`"
            )
        tensor = self.executor.output(self._step, call, ref)
        units = self._step.units[0].units[self.captured.plan.calls[call].network]
        spec = next(u.shapes.outputs[ref] for u in units if u.call == call and u.shapes is not None)
        if spec.requires_grad and torch.is_grad_enabled():
            tensor.requires_grad_()
            self._leaves[call, ref] = tensor
        return tensor

    def backward(self, run_backward: Callable[[], None] | None, *, reduce: bool = True) -> None:
        """The part of a step after the loss.

        Args:
            run_backward: On the loss rank, the backward of the loss.
            reduce: Whether the gradients become the means over the replicas.
        """
        context = self._step
        assert context is not None
        self._note_replay()
        if self.is_loss_rank:
            assert run_backward is not None
            started = time.perf_counter()
            run_backward()
            for call in self.captured.plan.calls_of("student"):
                gradients = {ref: t.grad for (c, ref), t in self._leaves.items() if c == call}
                self.executor.scatter_gradient(context, call, gradients)
            self._leaves = {}
            loss = Action(Op.LOSS, self.rank)
            self.executor.recorder.ran(self._index, loss, started)  # its second half
            self.executor.send(context, loss)
        run = partial(self.executor.run, context)
        if reduce and self._reduction is not None:
            self._reduction.run(self._rest_actions, run, self.executor.recorder)
        else:
            run(self._rest_actions)
        self.executor.finish(context)
        self._lookahead.units = context.units.get(1)
        self._index += 1
        self._step = None

    @property
    def position(self) -> tuple[int, int]:
        """The seed of the steps' random streams, and the number of the next step."""
        return self._seed, self._index

    def ahead(self) -> Ahead | None:
        """Between two steps: what has run ahead of the next one; None if nothing has."""
        return self._lookahead.state(self._index)

    def resume(self, position: tuple[int, int], ahead: Ahead | None) -> None:
        """Go on where another engine stopped; all ranks call it before their first step.

        Args:
            position: Its :attr:`position`.
            ahead: What its loss rank knew to have run ahead, on all ranks.

        Raises:
            CaptureError: The step uses other values of the teacher than that engine's.
        """
        self._lookahead.resume(ahead)
        self._seed, self._index = position

    def run_ahead(self, step: Step, batch: Any) -> None:
        """The teacher's calls of the coming step, now; every rank calls it before that step.

        Args:
            step: The step, a function of the batch.
            batch: The batch, on the data rank.
        """
        inputs: dict[int, tuple[Tensor, ...]] = {}
        if self.is_data_rank:
            inputs[1] = self._runner.inputs(step, batch, self._seed + self._index, effects=False)
            header = StepHeader.of(batch, inputs[1])
            header.send(self.transport)
        else:
            header = StepHeader.receive(self.transport, self.placement.data_rank)
        units, program = self._units(header.inputs), lower(teacher_only(self.pipeline))
        context = StepContext(self._index - 1, program, {1: units}, inputs)
        self.executor.post_receives(context)
        if self.is_data_rank:
            self.executor.send_inputs(context, 1)
        self.executor.run(context, program.schedule.ranks[self.rank])
        self.executor.finish(context)
        self._lookahead.units = units

    def note_optimizer(self, started: float) -> None:
        """The optimizer step of this rank ended; one beside the losses belongs to their time."""
        if self._step is None:
            self.executor.recorder.ran(self._index - 1, Action(Op.OPTIMIZER, self.rank), started)

    def drain(self) -> None:
        """Forget what ran ahead: the next batch is not the one that was announced."""
        self._lookahead.drop()
