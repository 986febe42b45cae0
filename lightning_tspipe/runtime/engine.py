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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.plan import NetworkName, StepPlan, TensorSpec, ValueRef
from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Networks, Step, Tracer
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.lowering import Program, lower
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.executor import BATCH_CHANNEL, Executor, StepContext
from lightning_tspipe.runtime.network import ChainNetwork
from lightning_tspipe.runtime.transport import Transport
from lightning_tspipe.runtime.units import StepUnits
from lightning_tspipe.runtime.weights import LOSS_RANK, Shards
from lightning_tspipe.schedules.registry import build_schedule
from lightning_tspipe.simulation.cost import CostTable

_BACKWARDS = frozenset({Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD, Op.OPTIMIZER})

BatchAndStep = tuple[Any, Step]


@dataclass(frozen=True)
class Captured:
    """A step after the trace: the plan and the networks that it calls."""

    plan: StepPlan
    networks: dict[NetworkName, ChainNetwork]


@dataclass(frozen=True)
class _Header:
    """What the data rank tells the others about a step.

    Attributes:
        structure: Pytree structure of the batch.
        leaves: Its leaves; tensors as specs.
        inputs: Specs of the call inputs.
        ahead: Those of the next batch, if its teacher runs ahead.
    """

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    inputs: tuple[TensorSpec, ...]
    ahead: tuple[TensorSpec, ...] | None


class Engine:
    """One rank of the pipeline.

    Args:
        module: The module that has the networks.
        networks: Their names.
        transport: How to reach the other ranks.
        device: Where this rank computes.
        seed: Seed of the steps' random streams, the same on all ranks.
        forward_context: The precision plugin's forward context.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank
        self,
        module: nn.Module,
        networks: Networks,
        transport: Transport,
        device: torch.device,
        seed: int = 0,
        forward_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.module = module
        self.transport = transport
        self.rank = transport.rank
        self._names = networks
        self._device = device
        self._seed = seed
        self._context = forward_context
        self._index = 0
        self._programs: dict[tuple[bool, bool], Program] = {}
        self._step: StepContext | None = None
        self._ahead_units: StepUnits | None = None
        self._leaves: dict[tuple[int, ValueRef], Tensor] = {}
        self._rest_actions: Sequence[Action] = ()

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank computes the loss."""
        return self.rank == LOSS_RANK

    @property
    def is_data_rank(self) -> bool:
        """Whether this rank reads the data."""
        return self.rank == self.placement.data_rank

    def capture(self, step: Step, batch: Any) -> Captured:
        """Trace a step on its first batch; all ranks do it, with the same batch.

        Raises:
            CaptureError: The step can't be captured.
        """
        plan = Tracer(self.module, self._names, self._device).trace(step, batch, self._seed)
        networks = {
            name: ChainNetwork(name, self.module, plan, self._device) for name in plan.chains
        }
        return Captured(plan, networks)

    def place(
        self, captured: Captured, placement: Placement, schedule: str, costs: CostTable | None
    ) -> None:
        """Cut the networks, keep this rank's stages, and build the schedules.

        Args:
            captured: What :meth:`capture` found.
            placement: Who gets what.
            schedule: ``tspipe``, ``gpipe`` or ``sequential``.
            costs: Costs of the stages, for the order of actions; None for equal ones.

        Raises:
            PartitionError: The cuts separate a tied parameter.
        """
        self.captured = captured
        self.placement = placement
        plan, networks = captured.plan, captured.networks
        self._cuts: dict[NetworkName, tuple[int, ...]] = {"student": placement.student_cuts}
        ranks: dict[NetworkName, tuple[int, ...]] = {"student": placement.student_ranks}
        if "teacher" in networks:
            self._cuts["teacher"] = placement.teacher_cuts
            ranks["teacher"] = placement.teacher_ranks
        for name, network in networks.items():
            network.check_cuts(self._cuts[name])
        self.pipeline = self._pipeline(plan, networks, ranks)
        self._schedule = schedule
        self._costs = costs or CostTable.uniform(self.pipeline)
        self.shards = Shards(self.module, networks, self._cuts, ranks)
        self.shards.place(self.rank, self._device)
        self._runner = StepRunner(
            self.module, self._names, plan, is_loss_rank=self.is_loss_rank
        )
        statistics = {
            name: DeferredStatistics(
                [self.module.get_submodule(block) for block in network.block_names]
            )
            for name, network in networks.items()
        }
        self.executor = Executor(
            self.transport, networks, statistics, self._context, self._device
        )

    def _pipeline(
        self,
        plan: StepPlan,
        networks: dict[NetworkName, ChainNetwork],
        ranks: dict[NetworkName, tuple[int, ...]],
    ) -> Pipeline:
        layouts = {
            name: NetworkLayout(
                ranks[name],
                len(plan.calls_of(name)),
                self.placement.num_microbatches,
                network.output_stages(self._cuts[name]),
            )
            for name, network in networks.items()
        }
        return Pipeline(
            self.transport.num_ranks,
            layouts["student"],
            layouts.get("teacher"),
            self.placement.data_rank,
            LOSS_RANK,
        )

    def program(self, *, teacher_now: bool, teacher_next: bool) -> Program:
        """The validated program of a step; the same on all ranks."""
        key = (teacher_now, teacher_next)
        if key not in self._programs:
            schedule = build_schedule(
                self._schedule,
                self.pipeline,
                self._costs,
                teacher_now=teacher_now,
                teacher_next=teacher_next,
                split=self.placement.split,
            )
            program = lower(schedule)
            validate(program)
            self._programs[key] = program
        return self._programs[key]

    def forward(self, step: Step, batch: Any, ahead: BatchAndStep | None) -> Any:
        """The part of a step up to the loss.

        Args:
            step: The step, a function of the batch.
            batch: The batch, on the data rank.
            ahead: On the data rank, the next batch and its step, if its teacher is to run ahead.

        Returns:
            On the loss rank what the step returns, elsewhere None.
        """
        header, inputs = self._exchange(step, batch, ahead)
        context = self._open_step(header, inputs)
        self._step = context
        executor = self.executor
        executor.post_receives(context)
        if not self.is_data_rank:
            started = time.perf_counter()
            meta = pytree.tree_unflatten(_meta_leaves(header.leaves), header.structure)
            self._runner.effects(step, meta, self._seed + self._index)
            executor.note(self._index, Action(Op.EFFECTS, self.rank), started)
        actions = context.program.schedule.ranks[self.rank]
        stop = next(
            i for i, action in enumerate(actions) if action.op in _BACKWARDS | {Op.LOSS}
        )
        fields = self._exchange_fields(header, batch)
        executor.run(context, actions[:stop])
        if actions[stop].op is not Op.LOSS:
            self._rest_actions = actions[stop:]
            return None
        self._rest_actions = actions[stop + 1 :]
        return self._loss(context, step, header, batch, fields)

    def _exchange(
        self, step: Step, batch: Any, ahead: BatchAndStep | None
    ) -> tuple[_Header, dict[int, tuple[Tensor, ...]]]:
        """On the data rank: find the call inputs and announce them; elsewhere: hear of them."""
        if not self.is_data_rank:
            header = self.transport.receive_object(self.placement.data_rank)
            assert isinstance(header, _Header)
            return header, {}
        started = time.perf_counter()
        seed = self._seed + self._index
        inputs = {0: self._runner.inputs(step, batch, seed, effects=True)}
        if ahead is not None:
            inputs[1] = self._runner.inputs(ahead[1], ahead[0], seed + 1, effects=False)
        leaves, structure = pytree.tree_flatten(batch)
        header = _Header(
            structure,
            tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves),
            tuple(map(TensorSpec.of, inputs[0])),
            tuple(map(TensorSpec.of, inputs[1])) if ahead is not None else None,
        )
        for rank in range(self.transport.num_ranks):
            if rank != self.rank:
                self.transport.send_object(header, rank)
        self.executor.note(self._index, Action(Op.DATA, self.rank), started)
        return header, inputs

    def _open_step(self, header: _Header, inputs: dict[int, tuple[Tensor, ...]]) -> StepContext:
        has_teacher = self.pipeline.teacher is not None
        program = self.program(
            teacher_now=has_teacher and self._ahead_units is None,
            teacher_next=has_teacher and header.ahead is not None,
        )
        units = {0: self._units(header.inputs)}
        if header.ahead is not None:
            units[1] = self._units(header.ahead)
        if self._ahead_units is not None and self._ahead_units.inputs != units[0].inputs:
            raise CaptureError(
                "the calls of this batch have other shapes than when its teacher ran ahead: the "
                "step must compute the same inputs whenever it is given the same batch"
            )
        context = StepContext(self._index, program, units, inputs)
        if self.is_data_rank:
            for offset in inputs:
                self.executor.send_inputs(context, offset)
        return context

    def _units(self, inputs: tuple[TensorSpec, ...]) -> StepUnits:
        return StepUnits(
            self.captured.plan,
            self.captured.networks,
            self._cuts,
            self.placement.num_microbatches,
            inputs,
            self._context,
        )

    def _exchange_fields(self, header: _Header, batch: Any) -> Any:
        """Bring the batch's fields that the step reads from the data rank to the loss rank."""
        fields = self.captured.plan.batch_fields
        if self.placement.data_rank == LOSS_RANK or not fields:
            return None
        if self.is_data_rank:
            leaves = pytree.tree_leaves(batch)
            self.transport.send([leaves[i] for i in fields], LOSS_RANK, BATCH_CHANNEL)
            return None
        if not self.is_loss_rank:
            return None
        specs = [header.leaves[i] for i in fields]
        return self.transport.receive(specs, self.placement.data_rank, BATCH_CHANNEL)

    def _loss(  # noqa: PLR0913, PLR0917 - all that the loss needs
        self, context: StepContext, step: Step, header: _Header, batch: Any, fields: Any
    ) -> Any:
        loss = Action(Op.LOSS, self.rank)
        self.executor.await_outputs(context, loss)
        if not self.is_data_rank:
            leaves = _meta_leaves(header.leaves)
            if fields is not None:
                received = fields.wait()
                for index, tensor in zip(self.captured.plan.batch_fields, received, strict=True):
                    leaves[index] = tensor
            batch = pytree.tree_unflatten(leaves, header.structure)
        self._leaves = {}
        started = time.perf_counter()
        result = self._runner.replay(step, batch, self._seed + self._index, self._output)
        self.executor.note(self._index, loss, started)
        return result

    def _output(self, call: int, ref: ValueRef) -> Tensor:
        assert self._step is not None
        tensor = self.executor.output(self._step, call, ref)
        units = self._step.units[0].units[self.captured.plan.calls[call].network]
        spec = next(u.shapes.outputs[ref] for u in units if u.call == call and u.shapes is not None)
        if spec.requires_grad and torch.is_grad_enabled():
            tensor.requires_grad_()
            self._leaves[call, ref] = tensor
        return tensor

    def backward(self, run_backward: Callable[[], None] | None) -> None:
        """The part of a step after the loss.

        Args:
            run_backward: On the loss rank, the backward of the loss.
        """
        context = self._step
        assert context is not None
        if self.is_loss_rank:
            assert run_backward is not None
            run_backward()
            for call in self.captured.plan.calls_of("student"):
                gradients = {ref: t.grad for (c, ref), t in self._leaves.items() if c == call}
                self.executor.scatter_gradient(context, call, gradients)
            self._leaves = {}
            self.executor.send(context, Action(Op.LOSS, self.rank))
        self.executor.run(context, self._rest_actions)
        self.executor.finish(context)
        self._ahead_units = context.units.get(1)
        self._index += 1
        self._step = None

    def drain(self) -> None:
        """Forget what ran ahead: the next batch is not the one that was announced."""
        if self._ahead_units is not None:
            self.executor.drop_lookahead()
            self._ahead_units = None


def _meta_leaves(leaves: Sequence[Any]) -> list[Any]:
    return [
        torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, TensorSpec) else x
        for x in leaves
    ]
