"""Forward-only steps through the pipeline: validation, prediction, feature extraction.

Batches follow each other without a barrier: while the loss rank works on one, the first stage is
at the next.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tspipe.capture.plan import NetworkName, TensorSpec, ValueRef
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Op
from lightning_tspipe.ir.lowering import Program, lower
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.runtime.batches.metadata import StepHeader
from lightning_tspipe.runtime.execution.context import StepContext
from lightning_tspipe.runtime.execution.executor import Executor
from lightning_tspipe.runtime.stages.captured import layout
from lightning_tspipe.runtime.stages.units import StepUnits
from lightning_tspipe.runtime.transport.channels import Channel, Lane, edges_from, program_edges
from lightning_tspipe.schedules.fanout import fanout
from lightning_tspipe.schedules.gpipe import gpipe

if TYPE_CHECKING:
    from lightning_tspipe.capture.trace import Step
    from lightning_tspipe.runtime.execution.engine import Engine

_FORWARD_OPS = frozenset({Op.DATA, Op.FORWARD, Op.TEACHER, Op.LOSS})


class Evaluation:
    """Runs one kind of forward-only step on a placed pipeline.

    Args:
        engine: The engine that holds the stages.
        step: The step, a function of the batch; calls pipelined submodules like a training step,
            from the start of their chain up to any block or part of it.
        batch: A first batch, the same on all ranks.

    Raises:
        CaptureError: The step can't be captured, or takes another way through a network.
    """

    def __init__(self, engine: Engine, step: Step, batch: Any) -> None:
        self._engine = engine
        self._index = 0
        self._place = (-1, 0)
        captured = engine.capture(step, batch, training=False)
        plan, networks = captured.plan, captured.networks
        trained, trained_cuts = engine.captured.whole.networks, engine.whole_cuts
        cuts: dict[NetworkName, tuple[int, ...]] = {}
        ranks = engine.whole_ranks
        for name, network in networks.items():
            # A teacher that the training doesn't call lies where the student does.
            like: NetworkName = name if name in trained else "student"
            ranks = {**ranks, name: ranks[like]}
            own = None
            if like in trained:
                own = network.cuts_like(trained[like], trained_cuts[like], engine.captured.followed)
            if own is None:
                raise CaptureError(
                    f"this step goes another way through the {name} than the step that the stages "
                    "were cut for: call its blocks, or their parts, in the same order, from the "
                    "first on"
                )
            cuts[name] = own
        self._plan = plan
        self._runner = engine.runner(plan)
        statistics = {
            name: DeferredStatistics([engine.module.get_submodule(b) for b in n.block_names])
            for name, n in networks.items()
        }
        self._executor = Executor(
            engine.transport, networks, statistics, engine.context, engine.device
        )
        self._pipeline = layout(captured, ranks, cuts, 1, engine.transport.num_ranks)
        self._program = _forward_program(self._pipeline)
        edges = program_edges(self._program)
        if plan.batch_fields:
            data_rank = engine.placement.data_rank
            edges |= edges_from(data_rank, self._pipeline.loss_ranks, Lane.FIELDS)
        engine.transport.open(edges)
        actions = self._program.schedule.ranks[engine.rank]
        reads, executed = Op.LOSS, _FORWARD_OPS
        if not self._pipeline.is_chain:
            reads, executed = Op.FORWARD, frozenset({Op.TEACHER})
        self._reader = next((action for action in actions if action.op is reads), None)
        self._executed = [action for action in actions if action.op in executed]

        def units(inputs: tuple[TensorSpec, ...]) -> StepUnits:
            return StepUnits(plan, networks, cuts, 1, inputs, engine.context)

        self._units: Callable[[tuple[TensorSpec, ...]], StepUnits] = units

    def run(self, step: Step, batch: Any, stop: str = "") -> Any:
        """One batch.

        Args:
            step: The step.
            batch: The batch, on the data rank.
            stop: On the data rank, what all ranks do after this batch, see ``stopping``.

        Returns:
            On the loss rank what the step returns, elsewhere None.
        """
        with _no_grad():
            return self._run(step, batch, stop)

    def _random_stream(self) -> int:
        """The seed of this batch's: of the training's next step and the batch's number behind it.

        So a run that is resumed draws in each validation what the whole run drew.
        """
        next_step = self._engine.position[1]
        before, number = self._place
        self._place = next_step, number + 1 if before == next_step else 0
        # Of a seed, a CPU's generator takes 32 bits: all of them are to differ.
        place = "/".join(map(str, self._place)).encode()
        return int.from_bytes(blake2b(place, digest_size=7).digest(), "little")

    def _run(self, step: Step, batch: Any, stop: str) -> Any:
        engine, executor, plan = self._engine, self._executor, self._plan
        seed = self._random_stream()
        inputs: dict[int, tuple[Tensor, ...]] = {}
        if engine.is_data_rank:
            inputs[0] = self._runner.inputs(step, batch, seed, effects=False)
            header = StepHeader.of(batch, inputs[0], stop=stop)
            header.send(engine.transport)
        else:
            header = StepHeader.receive(engine.transport, engine.placement.data_rank)
        engine.stop.hear(header.stop)
        context = StepContext(self._index, self._program, {0: self._units(header.inputs)}, inputs)
        executor.post_receives(context)
        if engine.is_data_rank:
            executor.send_inputs(context, 0)
        fields = header.exchange_fields(
            plan.batch_fields, batch, engine.transport, engine.placement.data_rank, Channel.FIELDS,
            self._pipeline.loss_ranks,
        )  # fmt: skip
        executor.run(context, self._executed)
        result = None
        if self._reader is not None:
            executor.await_outputs(context, self._reader)
            whole = batch if engine.is_data_rank else header.batch(plan.batch_fields, fields)

            def output(call: int, ref: ValueRef) -> Tensor:
                return executor.output(context, call, ref)

            result = self._runner.replay(step, whole, seed, output)
        executor.finish(context, in_training=False)
        self._index += 1
        return result


def _forward_program(pipeline: Pipeline) -> Program:
    if pipeline.is_chain:
        schedule = gpipe(pipeline)
    else:
        schedule = fanout(pipeline, before=0, following=0, depth=0)
    ranks = tuple(
        tuple(action for action in actions if action.op in _FORWARD_OPS)
        for actions in schedule.ranks
    )
    return lower(Schedule(pipeline, ranks))


def _no_grad() -> AbstractContextManager[Any]:
    """No gradients, but ordinary tensors: buffers are shared with the training."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(torch.no_grad())
    return stack
