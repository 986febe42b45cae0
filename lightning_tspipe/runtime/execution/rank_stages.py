"""The stages of one rank: made where they were placed, and run by the executor's actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline
from lightning_tspipe.networks.batchnorm import DeferredStatistics
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.execution.context import StepContext, backward_of, base_of
from lightning_tspipe.runtime.execution.executor import Handler
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.network import ChainNetwork
from lightning_tspipe.runtime.stages.outputs import Outputs
from lightning_tspipe.runtime.stages.running import Execution, InPieces, Run
from lightning_tspipe.runtime.stages.stage import Stage, Versions
from lightning_tspipe.runtime.stages.statistics import StageStatistics


class RankStages:
    """The stages of one rank.

    Args:
        stages: The stages.
        outputs: What goes between networks and losses.
    """

    def __init__(self, stages: Iterable[Stage], outputs: Outputs) -> None:
        self.outputs = outputs
        self._stages = {(stage.op is Op.TEACHER, stage.index): stage for stage in stages}

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages.values())

    def of(self, action: Action) -> Stage:
        """The stage that runs an action."""
        return self._stages[action.op is Op.TEACHER, action.stage]

    def use_versions(self, op: Op, versions: Versions) -> None:
        """Have the stages of a network read versions of their weights."""
        for stage in self:
            if stage.op is op:
                stage.versions = versions

    @property
    def handlers(self) -> dict[Op, Handler]:
        """What runs the actions of stages."""
        return {
            Op.FORWARD: self._forward,
            Op.TEACHER: self._forward,
            Op.BACKWARD: self._backward,
            Op.INPUT_BACKWARD: self._input_backward,
            Op.WEIGHT_BACKWARD: self._weight_backward,
        }

    def input_chunk(self, step: StepContext, action: Action) -> Tensor:
        """On the data rank: what the first stage of a network gets for a unit."""
        unit = step.units[action.batch].of(action)
        whole = step.inputs[action.batch][unit.call]
        return whole if unit.is_only else whole[unit.start : unit.start + unit.size]

    def _forward(self, step: StepContext, action: Action) -> None:
        stage, batch = self.of(action), step.index + action.batch
        received = stage.received.pop((batch, action.unit or 0), None)
        found = stage.forward(
            batch,
            action,
            step.units[action.batch],
            self._local_inputs(step, action) if received is None else received,
            is_received=received is not None,
        )
        if found:
            self.outputs.values[batch, base_of(action)] = found

    def _local_inputs(self, step: StepContext, action: Action) -> Tensors:
        """What a forward gets that reads what this rank has."""
        if step.units[action.batch].reads_known(action):
            return ()
        producer = step.program.needs[action][0].producer
        if producer.op is Op.DATA:
            return (self.input_chunk(step, action),)
        return self.of(producer).passed_on.pop((step.index + action.batch, producer.unit or 0))

    def _backward(self, step: StepContext, action: Action) -> None:
        self.of(action).backward((step.index, action.unit or 0), self._gradients(step, action))

    def _input_backward(self, step: StepContext, action: Action) -> None:
        place = step.index, action.unit or 0
        self.of(action).input_backward(place, self._gradients(step, action))

    def _weight_backward(self, step: StepContext, action: Action) -> None:
        self.of(action).weight_backward((step.index, action.unit or 0))

    def _gradients(self, step: StepContext, action: Action) -> list[Tensor | None]:
        """From the next stage, which may be on this rank, and from the loss."""
        stage, place = self.of(action), (step.index, action.unit or 0)
        following = stage.gradients.pop(place, None)
        next_here = self._stages.get((False, action.stage + 1))
        if following is None and next_here is not None:
            following = next_here.passed_back.pop(place, None)
        if following is None:
            following = stage.unused(action, step.units[0])
        return following + self.outputs.gradients.pop((step.index, backward_of(action)), [])

    def begin(self, batch: int) -> None:
        """The step of a batch begins: what ran ahead for it counts."""
        for stage in self:
            stage.statistics.commit_ahead(batch)

    def forget(self, batch: int) -> None:
        """The step of a batch is over."""
        for stage in self:
            stage.forget(batch)
        self.outputs.forget(batch)

    def clear(self) -> None:
        """Forget all that is in flight."""
        for stage in self:
            stage.clear()
        self.outputs.clear()


def place_stages(
    here: Rank, captured: Captured, pipeline: Pipeline, placement: Placement | None = None
) -> RankStages:
    """Make the stages of a rank that holds their parameters.

    Args:
        here: The rank.
        captured: The step.
        pipeline: The stages and their ranks.
        placement: Says how stages run; None: as they are.
    """
    rank, found = here.transport.rank, []
    for op, name, layout in networks_of(pipeline):
        network = captured.networks.get(name)
        if network is None:
            continue
        blocks = {block: here.module.get_submodule(block) for block in network.block_names}
        # BatchNorm that is frozen counts nothing.
        statistics = DeferredStatistics(blocks.values() if network.called_as == name else ())
        run = None
        if placement is not None:
            run = _run_of(here, network, blocks, statistics, placement)
        found += [
            Stage(
                op, index, network, here.context, StageStatistics(statistics, index),
                here.transport.recycle, run,
            )
            for index, owner in enumerate(layout.ranks)
            if owner == rank
        ]  # fmt: skip
    return RankStages(found, Outputs(rank, pipeline.student.ranks, here.device))


def networks_of(pipeline: Pipeline) -> list[tuple[Op, NetworkName, NetworkLayout]]:
    """The networks of a pipeline, with the op of their forwards."""
    found: list[tuple[Op, NetworkName, NetworkLayout]] = [(Op.FORWARD, "student", pipeline.student)]
    if pipeline.teacher is not None:
        found.append((Op.TEACHER, "teacher", pipeline.teacher))
    return found


def _run_of(
    here: Rank,
    network: ChainNetwork,
    blocks: dict[str, nn.Module],
    statistics: DeferredStatistics,
    placement: Placement,
) -> Run | None:
    """How the atoms of a network run, where not simply as they are."""
    again = placement.recomputed if network.name == "student" else frozenset()
    run: Run | None = None
    if here.compiler is not None or again:
        chain = network.compiled_chain(here.compiler)
        run = Execution(chain, blocks, statistics, again).run
    if network.name == "teacher" and placement.pieces.num_atoms:
        run = InPieces(run or network.chain.run, placement.pieces).run
    return run
