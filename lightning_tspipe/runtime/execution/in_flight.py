"""Batches in flight between two steps: written down by one run, and gone on with by another.

A rank whose forwards run w batches ahead holds, between two steps, the graphs of w batches, and
what the rank before has sent for one more. Graphs can't be written; what they saved can, together
with the stage's inputs. The forwards run once more, on any weights, and save that.

What is written are plain values and tensors, so a checkpoint can be read with ``weights_only``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import ValueRef
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.runtime.execution.context import StepContext
from lightning_tspipe.runtime.execution.rank_stages import RankStages
from lightning_tspipe.runtime.weights.versions import StageWeights

Written = dict[str, Any]


def write(stages: RankStages, weights: StageWeights, module: nn.Module) -> Written:
    """One rank's batches in flight, of which nothing is under way.

    Args:
        stages: Hold them.
        weights: What they have read.
        module: The LightningModule, for the names of layers.
    """
    names = {layer: name for name, layer in module.named_modules()}
    saved = {
        (batch, stage.index, unit): each
        for stage in stages
        for (batch, unit), each in stage.saved.items()
    }
    return {
        "weights": weights.written(),
        "received": [
            [batch, str(Action(stage.op, stage.index, unit)), _copies(tensors)]
            for stage in stages
            for (batch, unit), tensors in stage.received.items()
        ],
        "outputs": [
            [batch, str(action), [[r.position, r.slot, t.clone()] for r, t in values.items()]]
            for (batch, action), values in stages.outputs.values.items()
        ],
        "inputs": [
            [batch, stage, unit, _copies(saved.inputs)]
            for (batch, stage, unit), saved in sorted(saved.items(), key=lambda one: one[1].number)
        ],
        "statistics": [
            [
                stage.network.name, batch, index, call,
                {names[layer]: list(map(list, parts)) for layer, parts in layers.items()},
            ]
            for stage in stages
            for (batch, index, call), layers in stage.statistics.ahead()
        ],
    }  # fmt: skip


def read_back(  # noqa: PLR0913, PLR0917 - all that holds a part of them
    written: Written,
    stages: RankStages,
    weights: StageWeights,
    step: StepContext,
    module: nn.Module,
    device: torch.device,
) -> None:
    """Before the first step of another run: its batches are in flight here.

    Args:
        written: What :func:`write` gave on this rank.
        stages: Will hold them.
        weights: What they have read.
        step: The step that is about to begin.
        module: The LightningModule.
        device: Where this rank computes.

    Raises:
        ConfigurationError: A forward isn't the same as in that run.
    """
    weights.read_back(written["weights"])
    for batch, text, tensors in written["received"]:
        action = Action.parse(text)
        place = batch, action.unit or 0
        stages.of(action).received[place] = tuple(t.to(device) for t in tensors)
    for batch, text, values in written["outputs"]:
        stages.outputs.values[batch, Action.parse(text)] = {
            ValueRef(position, slot): value.to(device) for position, slot, value in values
        }
    layers = dict(module.named_modules())
    ops = {"student": Op.FORWARD, "teacher": Op.TEACHER}
    for network, batch, stage, call, parts in written["statistics"]:
        mine = {
            layers[name]: [(n, mean.to(device), variance.to(device)) for n, mean, variance in own]
            for name, own in parts.items()
        }
        owner = stages.of(Action(ops[network], stage, 0))
        owner.statistics.put_ahead((batch, stage, call), mine)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    flights, calls = written["weights"]["flights"], dict.fromkeys(written["weights"]["flights"], 0)
    for batch, stage, unit, tensors in written["inputs"]:
        action = Action(Op.FORWARD, stage, unit, batch - step.index)
        inputs = tuple(t.to(device) for t in tensors)
        with weights.again(batch, flights[batch], calls[batch]):
            stages.of(action).repeat(batch, action, step.units[action.batch], inputs)
        calls[batch] += 1
    for buffer, before in buffers:
        buffer.data.copy_(before)


def _copies(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]
