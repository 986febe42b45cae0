"""The one dependency relation: lowering, validation, simulation and the executor all use it.

Within one batch (arrows point from what must happen first)::

    D ──► F(0,u) ──► F(1,u) ──► ... ──► L ──► B(last,u) ──► ... ──► B(0,u) ──► O
    │                  └─ outputs ─────►│ ▲      I/W: W(s,u) after I(s,u)
    ├──► T(0,u) ──► T(1,u) ──► ... ─────┘ │
    └──────── batch fields ───────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import NetworkLayout, Pipeline


@dataclass(frozen=True, slots=True)
class Dependency:
    """``consumer`` waits for ``producer``; ``payload`` tells what travels between them.

    Payloads: ``"input"`` (call inputs), ``"batch"`` (batch fields for the loss), ``"activation"``
    (stage to stage), ``"output"`` (network output to the loss), ``"gradient"`` (backwards, from
    the loss too), ``"saved"`` (what a forward or the input half of a backward keeps on its rank).
    """

    producer: Action
    consumer: Action
    payload: str


def depends_on(
    action: Action, pipeline: Pipeline, split: frozenset[int] = frozenset()
) -> tuple[Dependency, ...]:
    """What ``action`` waits for, within its own batch.

    Args:
        action: The consumer.
        pipeline: Who holds what.
        split: Student stages whose backward is split into I and W.
    """

    def on(payload: str, *producers: Action) -> tuple[Dependency, ...]:
        return tuple(Dependency(producer, action, payload) for producer in producers)

    batch = action.batch
    if action.op in {Op.FORWARD, Op.TEACHER}:
        if action.stage == 0:
            return on("input", Action(Op.DATA, pipeline.data_rank, batch=batch))
        return on("activation", Action(action.op, action.stage - 1, action.unit, batch))
    if action.op is Op.LOSS:
        data = on("batch", Action(Op.DATA, pipeline.data_rank, batch=batch))
        networks = [(Op.FORWARD, pipeline.student)]
        if pipeline.teacher is not None:
            networks.append((Op.TEACHER, pipeline.teacher))
        outputs = [a for op, layout in networks for a in _outputs(op, layout, batch)]
        return data + on("output", *outputs)
    if action.op in {Op.BACKWARD, Op.INPUT_BACKWARD}:
        return on("saved", Action(Op.FORWARD, action.stage, action.unit, batch)) + on(
            "gradient", *_gradient_sources(action, pipeline, split)
        )
    if action.op is Op.WEIGHT_BACKWARD:
        return on("saved", Action(Op.INPUT_BACKWARD, action.stage, action.unit, batch))
    return ()


def _outputs(op: Op, layout: NetworkLayout, batch: int) -> list[Action]:
    return [
        Action(op, stage, unit, batch)
        for unit in range(layout.num_units)
        for stage in sorted(layout.output_stages)
    ]


def _gradient_sources(action: Action, pipeline: Pipeline, split: frozenset[int]) -> list[Action]:
    sources = []
    following = action.stage + 1
    if following < pipeline.student.num_stages:
        op = Op.INPUT_BACKWARD if following in split else Op.BACKWARD
        sources.append(Action(op, following, action.unit, action.batch))
    if action.stage in pipeline.student.output_stages:
        sources.append(Action(Op.LOSS, pipeline.loss_rank, batch=action.batch))
    return sources
