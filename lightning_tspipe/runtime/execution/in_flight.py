"""Batches in flight between two steps: written down by one run, and gone on with by another.

A rank whose forwards run w batches ahead holds, between two steps, the graphs of w batches, and
what the rank before has sent for one more. Graphs can't be written; what they saved can, together
with the stage's inputs. The forwards run once more, on any weights, and save that.

What is written are plain values and tensors, so a checkpoint can be read with ``weights_only``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import ValueRef
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.runtime.execution.context import StepContext
from lightning_tspipe.runtime.execution.executor import Executor
from lightning_tspipe.runtime.stages.units import StepUnits
from lightning_tspipe.runtime.weights.versions import StageWeights

Written = dict[str, Any]


def write(
    executor: Executor, weights: StageWeights, units: Mapping[int, StepUnits], module: nn.Module
) -> Written:
    """One rank's batches in flight.

    Args:
        executor: Holds them.
        weights: What they have read.
        units: Of these batches, by their numbers.
        module: The LightningModule, for the names of layers.
    """
    held = executor.under_way(units)
    names = {layer: name for name, layer in module.named_modules()}
    return {
        "weights": weights.written(),
        "received": [
            [batch, str(action), _copies(tensors)]
            for (batch, action), tensors in held.received.items()
        ],
        "outputs": [
            [batch, str(action), [[r.position, r.slot, t.clone()] for r, t in values.items()]]
            for (batch, action), values in held.outputs.items()
        ],
        "inputs": [[*key, _copies(tensors)] for key, tensors in held.inputs.items()],
        "statistics": [
            [network, batch, stage, call, {names[x]: list(map(list, p)) for x, p in parts.items()}]
            for network, batch, stage, call, parts in executor.statistics.uncommitted()
        ],
    }  # fmt: skip


def read_back(  # noqa: PLR0913, PLR0917 - all that holds a part of them
    written: Written,
    executor: Executor,
    weights: StageWeights,
    step: StepContext,
    module: nn.Module,
    device: torch.device,
) -> None:
    """Before the first step of another run: its batches are in flight here.

    Args:
        written: What :func:`write` gave on this rank.
        executor: Will hold them.
        weights: What they have read.
        step: The step that is about to begin.
        module: The LightningModule.
        device: Where this rank computes.

    Raises:
        ConfigurationError: A forward isn't the same as in that run.
    """
    weights.read_back(written["weights"])
    held = executor.under_way({})
    for batch, action, tensors in written["received"]:
        held.received[batch, Action.parse(action)] = tuple(t.to(device) for t in tensors)
    for batch, action, values in written["outputs"]:
        held.outputs[batch, Action.parse(action)] = {
            ValueRef(position, slot): value.to(device) for position, slot, value in values
        }
    layers = dict(module.named_modules())
    for network, batch, stage, call, parts in written["statistics"]:
        mine = {
            layers[name]: [(n, mean.to(device), variance.to(device)) for n, mean, variance in own]
            for name, own in parts.items()
        }
        executor.statistics.put_uncommitted(network, (batch, stage, call), mine)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    flights, calls = written["weights"]["flights"], dict.fromkeys(written["weights"]["flights"], 0)
    for batch, stage, unit, tensors in written["inputs"]:
        action = Action(Op.FORWARD, stage, unit, batch - step.index)
        with weights.again(batch, flights[batch], calls[batch]):
            executor.repeat(step, action, tuple(t.to(device) for t in tensors))
        calls[batch] += 1
    for buffer, before in buffers:
        buffer.data.copy_(before)


def _copies(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]
