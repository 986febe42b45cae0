"""Forward-only steps through the pipeline: validation, prediction, feature extraction.

Batches follow each other without a barrier: while the loss rank works on one, the first stage is
at the next.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import Any

import torch

from lightning_tspipe.capture.plan import Inputs, NetworkName
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Op
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.replay.purity import fingerprints, is_compared
from lightning_tspipe.runtime.batches.metadata import StepHeader
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.executor import StepContext
from lightning_tspipe.runtime.stages.captured import Captured, StepUnits
from lightning_tspipe.runtime.transport.channels import Channel, Lane, edges_from, program_edges
from lightning_tspipe.schedules.registry import build_step

_FORWARD_OPS = frozenset({Op.DATA, Op.PROLOGUE, Op.FORWARD, Op.TEACHER, Op.LOSS})


class Forwards:
    """Runs the forwards of a captured step on a placed pipeline, with whole batches.

    Args:
        engine: The engine that holds the stages.
        captured: The step.
        placement: Where its networks are cut, as the engine's are.
    """

    def __init__(self, engine: Engine, captured: Captured, placement: Placement) -> None:
        self._engine, self._captured, self._placement = engine, captured, placement
        mode = engine.mode.in_evaluation
        self._pipeline = mode.layout(captured, placement)
        whole = build_step("gpipe", self._pipeline, fresh=True, ahead=0).ranks
        forwards = tuple(tuple(a for a in own if a.op in _FORWARD_OPS) for own in whole)
        self._program = Schedule(self._pipeline, forwards)
        engine.transport.open(program_edges(self._program))
        # Of its own: the training's stages keep what they hold.
        self._losses = engine.prepare(captured, self._pipeline, mode)
        self._stages = self._losses.stages

    def _finish(self, index: int) -> None:
        self._losses.done()
        self._stages.finish(index, in_training=False)


class Evaluation(Forwards):
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
        self._index = 0
        self._place = (-1, 0)
        captured = engine.here.capture(step, batch, training=False)
        for parameter in captured.plan.parameters:
            if not engine.shards.holds(parameter, LOSS_RANK):
                raise CaptureError(
                    f"this step computes with {parameter!r}, which is on another rank, since the "
                    "training step doesn't do so. Call the part of the network that has it inside"
                )
        trained, trained_cuts = engine.captured.whole.networks, engine.whole.cuts
        cuts: dict[NetworkName, tuple[int, ...]] = {"student": (), "teacher": ()}
        ranks = engine.whole.ranks
        for name, network in captured.networks.items():
            # A teacher that the training doesn't call lies where the student does.
            like: NetworkName = name if name in trained else "student"
            ranks[name] = ranks[like]
            own = None
            if like in trained:
                own = network.cuts_like(trained[like], trained_cuts[like], engine.captured.followed)
            if own is None:
                raise CaptureError(
                    f"this step takes a different path through the {name} than the step that the "
                    "stages were cut for: call its blocks, or their parts, in the same order, "
                    "starting with the first"
                )
            cuts[name] = own
        placement = Placement(
            engine.transport.num_ranks, cuts["student"], ranks["student"], cuts["teacher"],
            ranks["teacher"], data_rank=engine.placement.data_rank,
        )  # fmt: skip
        super().__init__(engine, captured, placement)
        data_rank, loss_ranks = self._pipeline.data_rank, self._pipeline.loss_ranks
        engine.transport.open(edges_from(data_rank, loss_ranks, Lane.FIELDS))

    # No gradients, but ordinary tensors: buffers are shared with the training.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def run(self, step: Step, batch: Any, stop: str = "") -> Any:
        """One batch.

        Args:
            step: The step.
            batch: The batch, on the data rank.
            stop: On the data rank, what all ranks do after this batch, see ``stopping``.

        Returns:
            On the loss rank what the step returns, elsewhere None.
        """
        engine, plan = self._engine, self._captured.plan
        seed = self._random_stream()
        inputs: dict[int, Inputs] = {}
        prologue = partial(self._losses.runner.inputs, step, batch, seed, effects=False)

        def describe() -> StepHeader:
            inputs[0] = made = prologue()
            compared = made if is_compared(self._index, 0, seed) else ()
            return StepHeader.of(batch, made, stop=stop, fingerprints=fingerprints(compared))

        header = engine.share_header(describe)
        units = StepUnits(self._captured, self._placement, header.inputs)
        context = StepContext(self._index, self._program, {0: units}, inputs, prologue=prologue)
        self._stages.post_receives(context)
        actions = self._program.ranks[engine.rank]
        self._stages.run(context, (a for a in actions if a.op is Op.DATA))
        fields = header.exchange_fields(
            plan, batch, engine.transport, Channel.FIELDS, self._pipeline
        )

        def whole() -> Any:
            return batch if engine.is_data_rank else header.batch(plan, fields)

        context.replay = step, whole, seed, header.fingerprints
        self._stages.run(context, (a for a in actions if a.op is not Op.DATA))
        self._finish(self._index)
        self._index += 1
        return context.result

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
