"""The one dependency relation: messages, validation, simulation and the executor all use it.

Within one batch (arrows point from what must happen first)::

    D ──► F(0,u) ──► F(1,u) ──► ... ──► L ──► B(last,u) ──► ... ──► B(0,u) ──► O
    │                  └─ outputs ─────►│ ▲      I/W: W(s,u) after I(s,u)
    ├──► T(0,u) ──► T(1,u) ──► ... ─────┘ │
    └──────── batch fields ───────────────┘

That is a chain. If its student reads the teacher, one more prologue makes what it gets::

    fed        D ──► T(0,u) ──► ... ──► T(last,*) ──► P ──► F(0,u) ──► ... ──► L

Where each rank has a loss of its own (``Coupling``), stages of the student wait
for the teacher only::

    fan-out    T(last,*) ─────► F(head,u) ──► L(rank) ──► B(head,u)
    blockwise  T(s-1,u) ──┬───► F(s,u) ─────► L(rank) ──► B(s,u)
                          └───► T(s,u) ─────────┘

A student whose beginning is frozen is a chain that begins with the teacher::

    prefix     D ──► T(0,u) ──► ... ──► T(last,u) ──► F(0,u) ──► ... ──► L

Data that several actions of a rank read is sent once: the first saves it for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Coupling, NetworkLayout, Pipeline
from lightning_tspipe.ir.shares import may_overlap


@dataclass(frozen=True, slots=True)
class Dependency:
    """``consumer`` waits for ``producer``; ``payload`` is the data sent between them.

    Payloads: ``"input"`` (call inputs), ``"batch"`` (batch fields for the loss), ``"activation"``
    (stage to stage), ``"output"`` (network output to the loss), ``"gradient"`` (backwards, from
    the loss too), ``"saved"`` (saved on its rank by a forward or the input half of a backward),
    ``"reduction"`` (weight gradients, among the ranks that share a stage).

    Attributes:
        place: Where the data lies in between, whatever the batch: with which action, and as what.
    """

    producer: Action
    consumer: Action
    payload: str
    place: tuple[Action, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Computed once, since the executor looks up everything by places.
        is_of_loss = self.producer.op is Op.LOSS
        # Of what the data rank and losses give, each reader gets something else.
        by_reader = is_of_loss or self.payload == "input"
        action = batchless(self.consumer if by_reader else self.producer)
        place = action, OF_LOSS if is_of_loss else self.payload
        object.__setattr__(self, "place", place)


OF_LOSS = "gradient of the loss"


@cache
def batchless(action: Action) -> Action:
    """The action without its batch offset, and the whole backward of a half."""
    op = Op.BACKWARD if action.op is Op.INPUT_BACKWARD else action.op
    return Action(op, action.stage, action.unit)


def depends_on(
    action: Action, pipeline: Pipeline, split: frozenset[int] = frozenset()
) -> tuple[Dependency, ...]:
    """The dependencies of ``action`` within its own batch.

    Args:
        action: The consumer.
        pipeline: The pipeline.
        split: Student stages whose backward is split into I and W.
    """

    def on(payload: str, *producers: Action) -> tuple[Dependency, ...]:
        return tuple(Dependency(producer, action, payload) for producer in producers)

    batch = action.batch
    if action.op in {Op.FORWARD, Op.TEACHER}:
        payload, producers = _read_by_forward(action, pipeline)
        return on(payload, *producers)
    if action.op is Op.LOSS:
        data = on("batch", Action(Op.DATA, pipeline.data_rank, batch=batch))
        return data + on("output", *_read_by_loss(action, pipeline))
    if action.op in {Op.BACKWARD, Op.INPUT_BACKWARD}:
        return on("saved", Action(Op.FORWARD, action.stage, action.unit, batch)) + on(
            "gradient", *_gradient_sources(action, pipeline, split)
        )
    if action.op is Op.WEIGHT_BACKWARD:
        return on("saved", Action(Op.INPUT_BACKWARD, action.stage, action.unit, batch))
    if action.op is Op.PROLOGUE:
        return on("output", *_outputs(Op.TEACHER, pipeline.layout(Op.TEACHER), batch))
    return on("reduction", *_reduced(action, pipeline)) if action.op is Op.OPTIMIZER else ()


def _relayed(action: Action, pipeline: Pipeline) -> list[Action]:
    """The shares of the stage before that may overlap with this one."""
    groups, stage, unit = pipeline.layout(action.op).groups, action.stage, action.unit
    assert unit is not None
    width, before = len(groups[stage]), len(groups[stage - 1])
    others = [other for other in range(before) if may_overlap(other, before, unit, width)]
    return [Action(action.op, stage - 1, other, action.batch) for other in others]


def _reduced(action: Action, pipeline: Pipeline) -> list[Action]:
    """The backwards of the other ranks that share a stage with this one."""
    return [
        Action(Op.BACKWARD, stage, unit, action.batch)
        for stage, group in enumerate(pipeline.student.groups)
        if action.stage in group
        for unit, rank in enumerate(group)
        if rank != action.stage
    ]


def _read_by_forward(action: Action, pipeline: Pipeline) -> tuple[str, list[Action]]:
    if action.op is Op.FORWARD and pipeline.coupling is Coupling.FANOUT:
        return _read_by_head(action, pipeline)
    if action.op is Op.FORWARD and pipeline.coupling is Coupling.BLOCKWISE:
        return "saved", [Action(Op.TEACHER, action.stage, action.unit, action.batch)]
    if action.stage == 0 and action.op is Op.FORWARD and pipeline.coupling is Coupling.PREFIX:
        last = pipeline.layout(Op.TEACHER).num_stages - 1
        return "activation", [Action(Op.TEACHER, last, action.unit, action.batch)]
    if action.stage == 0 or not pipeline.is_relayed:
        is_fed = action.op is Op.FORWARD and pipeline.is_fed
        source = Op.PROLOGUE if is_fed else Op.DATA
        return "input", [Action(source, pipeline.data_rank, batch=action.batch)]
    if pipeline.layout(action.op).groups:
        return "activation", _relayed(action, pipeline)
    return "activation", [Action(action.op, action.stage - 1, action.unit, action.batch)]


def _read_by_head(action: Action, pipeline: Pipeline) -> tuple[str, list[Action]]:
    """Inputs of a head: the teacher's outputs, which a rank's first head saves for the others."""
    first = pipeline.stages_of(pipeline.student.ranks[action.stage])[0]
    if action.stage != first:
        return "saved", [Action(Op.FORWARD, first, action.unit, action.batch)]
    return "output", _outputs(Op.TEACHER, pipeline.layout(Op.TEACHER), action.batch)


def _read_by_loss(loss: Action, pipeline: Pipeline) -> list[Action]:
    teacher = pipeline.teacher
    if pipeline.is_chain:
        outputs = _outputs(Op.FORWARD, pipeline.student, loss.batch)
        return outputs + ([] if teacher is None else _outputs(Op.TEACHER, teacher, loss.batch))
    own = pipeline.stages_of(loss.stage)
    # The loss of a head needs the teacher's outputs only through the head's input.
    ops = [Op.FORWARD] + [Op.TEACHER] * (pipeline.coupling is Coupling.BLOCKWISE)
    return [
        Action(op, stage, unit, loss.batch)
        for op in ops
        for stage in own
        for unit in pipeline.student.units_of(stage)
        if pipeline.student.holder(stage, unit) == loss.stage
    ]


def _outputs(op: Op, layout: NetworkLayout, batch: int) -> list[Action]:
    stages = sorted(layout.output_stages)
    return [Action(op, stage, unit, batch) for unit in range(layout.num_units) for stage in stages]


def _gradient_sources(action: Action, pipeline: Pipeline, split: frozenset[int]) -> list[Action]:
    if not pipeline.is_chain:
        return [Action(Op.LOSS, pipeline.rank_of(action), batch=action.batch)]
    sources = []
    following = action.stage + 1
    if following < pipeline.student.num_stages:
        op = Op.INPUT_BACKWARD if following in split else Op.BACKWARD
        sources.append(Action(op, following, action.unit, action.batch))
    if action.stage in pipeline.student.output_stages:
        sources.append(Action(Op.LOSS, pipeline.loss_rank, batch=action.batch))
    return sources
