"""Asynchronous 1F1B with each weight policy, sequentially, on one device, in a few plain lines.

A network is a list of stages, a stage one of layers. Stage d of P runs the forward of batch n + w
in step n (w = P - 1 - d), then the backward of batch n and its own update. A layer's backward is
that of the layer at the input that its forward saw, with the weights that the policy names. An LSTM
is as many layers as there are places and gates, so its backward is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]
LossOf = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Emulated:
    """What it left behind."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Weights] = field(default_factory=list)
    reads: dict[int, list[tuple[int, bool, int, int]]] = field(default_factory=dict)


class Recurrent(nn.Module):
    """One layer of an LSTM, ``(batch, length, width)`` to ``(batch, length, out)``."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, out, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.cells(tokens)[0]


@dataclass
class Place:
    """What an LSTM's forward saved of one place: its input, the state before it, its gates."""

    x: Tensor
    hidden: Tensor
    cell: Tensor
    gates: tuple[Tensor, Tensor, Tensor, Tensor]
    squashed: Tensor


@dataclass
class Stage:
    """One stage: its layers, and what is under way in it."""

    layers: nn.Sequential
    place: int
    num_stages: int
    versions: list[Weights] = field(default_factory=list)
    inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    places: dict[tuple[int, int], list[Place]] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    base: int = 0

    def now(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.layers.named_parameters()}


def emulate(  # noqa: C901, PLR0912, PLR0913 - the schedule, as plain as it gets
    stages: Sequence[nn.Sequential],
    loss_of: LossOf,
    epochs: Sequence[Sequence[tuple[Tensor, Tensor]]],
    optimizer: torch.optim.Optimizer,
    policy: str,
    *,
    accumulate: int = 1,
    again: bool = False,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    clip: float | None = None,
) -> Emulated:
    """Train the stages.

    Args:
        stages: In order; they are trained in place.
        loss_of: The loss of the last stage's output and the labels.
        epochs: Batches of inputs and labels; the pipeline is empty where an epoch begins.
        optimizer: Of all parameters.
        policy: ``pipedream``, ``2bw``, ``pipeoptim`` or ``spectrain``.
        accumulate: Batches per update; the last one of an epoch ends with an update.
        again: Whether a stage's backward runs its forward again.
        scheduler: Goes on after every update.
        clip: The largest norm of a stage's gradients.
    """
    found = Emulated()
    all_stages = [Stage(s, d, len(stages)) for d, s in enumerate(stages)]
    depth, number = len(stages), 0
    for stage in all_stages:
        stage.versions.append(stage.now())
    for batches in epochs:
        for stage in all_stages:
            stage.base = len(stage.versions) - 1
        for step, (_, labels) in enumerate(batches):
            for stage in all_stages:
                ahead = depth - 1 - stage.place
                for batch in range(0 if step == 0 else step + ahead, step + ahead + 1):
                    if batch < len(batches):
                        before = all_stages[stage.place - 1].outputs if stage.place else None
                        x = batches[batch][0] if before is None else before.pop(batch)
                        due = updates(step, batch, accumulate)
                        weights = forward_weights(stage, policy, optimizer, due, batch, accumulate)
                        run(stage, x, weights, batch)
            output = all_stages[-1].outputs.pop(step).requires_grad_()
            loss = loss_of(output, labels)
            found.losses.append(loss.detach())
            (gradient,) = torch.autograd.grad(loss / accumulate, output)
            for stage in reversed(all_stages):
                weights = backward_weights(stage, policy, optimizer, step, accumulate)
                if again:
                    with frozen_buffers(stage.layers):
                        run(stage, stage.inputs[step][0], weights, step)
                    del stage.outputs[step]
                gradient = run_back(stage, weights, gradient, step)
            found.gradients.append(
                {f"{s.place}.{n}": p.grad.clone() for s in all_stages
                 for n, p in s.layers.named_parameters() if p.grad is not None}
            )  # fmt: skip
            number += 1
            if (step + 1) % accumulate == 0 or step + 1 == len(batches):
                for layers in stages if clip is not None else ():
                    nn.utils.clip_grad_norm_(layers.parameters(), clip or 0.0)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                remember_gradients(optimizer)
                optimizer.zero_grad()
                for stage in all_stages:
                    stage.versions.append(stage.now())
    return found


def updates(first: int, last: int, accumulate: int) -> int:
    """Updates between the beginnings of two steps of an epoch."""
    return sum((step + 1) % accumulate == 0 for step in range(first, last))


def delayed(stage: Stage, batch: int, accumulate: int) -> Weights:
    """2BW: the version before the one that would be due, and none from before the epoch."""
    due = stage.base + updates(0, batch, accumulate)
    delay = 1 if stage.num_stages > 1 else 0
    return stage.versions[max(stage.base, due - delay)]


def forward_weights(  # noqa: PLR0913, PLR0917
    stage: Stage, policy: str, optimizer: torch.optim.Optimizer, due: int, batch: int, every: int
) -> Weights:
    if policy == "2bw":
        return delayed(stage, batch, every)
    if policy == "pipeoptim":
        return predicted(stage, optimizer, due)
    if policy == "spectrain":
        return predicted(stage, optimizer, due + updates(batch, batch + stage.place // 2, every))
    return stage.now()


def backward_weights(
    stage: Stage, policy: str, optimizer: torch.optim.Optimizer, batch: int, every: int
) -> Weights:
    if policy == "2bw":
        return delayed(stage, batch, every)
    if policy == "pipedream":
        # The version that was the current one in the step of its forward.
        ahead = min(batch, stage.num_stages - 1 - stage.place)
        return stage.versions[-1 - updates(batch - ahead, batch, every)]
    if policy == "spectrain":
        return predicted(stage, optimizer, updates(batch, batch + stage.place // 2, every))
    return stage.now()


def predicted(stage: Stage, optimizer: torch.optim.Optimizer, steps: int) -> Weights:
    (group,) = optimizer.param_groups
    return {
        name: p.detach() - group["lr"] * steps * direction(optimizer, group, p)
        for name, p in stage.layers.named_parameters()
    }


def direction(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter) -> Tensor:
    """What the learning rate multiplies, as far as the state tells."""
    state, name = optimizer.state.get(p), type(optimizer).__name__
    if not state:
        return torch.zeros_like(p)
    if name in {"Adam", "AdamW"}:
        beta1, beta2 = group["betas"]
        t = state["step"]
        mean = state["exp_avg"] / (1 - beta1**t)
        square = state["exp_avg_sq"] / (1 - beta2**t)
        decay = group["weight_decay"] if name == "AdamW" else 0.0
        return mean / (square.sqrt() + group["eps"]) + decay * p.detach()
    if group["momentum"]:
        return state["momentum_buffer"]
    last = state["remembered"] + group["weight_decay"] * p.detach()
    if name == "RMSprop":
        return last / (state["square_avg"].sqrt() + group["eps"])
    return last


def remember_gradients(optimizer: torch.optim.Optimizer) -> None:
    """The gradients of the last update, for optimizers that keep none."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if "momentum" in group and not group["momentum"] and p.grad is not None:
                optimizer.state[p]["remembered"] = p.grad.clone()


def run(stage: Stage, x: Tensor, weights: Weights, batch: int) -> None:
    """All layers, each one's input remembered."""
    stage.inputs[batch] = []
    for index, layer in enumerate(stage.layers):
        stage.inputs[batch].append(x)
        with torch.no_grad():
            if isinstance(layer, Recurrent):
                x, stage.places[batch, index] = run_cells(of_layer(weights, index), x)
            else:
                x = functional_call(layer, of_layer(weights, index), (x,))
    stage.outputs[batch] = x


def run_back(stage: Stage, weights: Weights, gradient: Tensor, batch: int) -> Tensor:
    """Gradients of the parameters are added up; that of the stage's input is returned."""
    inputs = stage.inputs.pop(batch)
    for index in reversed(range(len(inputs))):
        layer = stage.layers[index]
        own = {n: w.detach().requires_grad_() for n, w in of_layer(weights, index).items()}
        if isinstance(layer, Recurrent):
            places = stage.places.pop((batch, index))
            gradient, *rest = run_cells_back(own, places, gradient)
        else:
            x = inputs[index].detach().requires_grad_()
            with frozen_buffers(layer):
                y = functional_call(layer, own, (x,))
                gradient, *rest = torch.autograd.grad(y, [x, *own.values()], gradient)
        for name, value in zip(own, rest, strict=True):
            parameter = layer.get_parameter(name)
            parameter.grad = value if parameter.grad is None else parameter.grad + value
    return gradient


def run_cells(weights: Weights, x: Tensor) -> tuple[Tensor, list[Place]]:
    """An LSTM, place after place."""
    w_x, w_h, b_x, b_h = weights.values()
    hidden = cell = x.new_zeros(len(x), w_h.shape[1])
    places, outputs = [], []
    for now in x.unbind(1):
        i, f, g, o = (now @ w_x.T + b_x + hidden @ w_h.T + b_h).chunk(4, 1)
        gates = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        new = gates[1] * cell + gates[0] * gates[2]
        places.append(Place(now, hidden, cell, gates, new.tanh()))
        cell, hidden = new, gates[3] * new.tanh()
        outputs.append(hidden)
    return torch.stack(outputs, 1), places


@torch.no_grad()
def run_cells_back(weights: Weights, places: list[Place], gradient: Tensor) -> list[Tensor]:
    """The gradients of the input and of the weights: saved gates, given weights."""
    w_x, w_h, *_ = weights.values()
    found = [torch.zeros_like(w) for w in weights.values()]
    inputs: list[Tensor] = []
    d_hidden = d_cell = torch.zeros_like(places[0].hidden)
    for place, above in zip(reversed(places), reversed(gradient.unbind(1)), strict=True):
        i, f, g, o = place.gates
        d_hidden = d_hidden + above
        d_cell = d_cell + d_hidden * o * (1 - place.squashed**2)
        before = torch.cat(
            [
                d_cell * g * i * (1 - i),
                d_cell * place.cell * f * (1 - f),
                d_cell * i * (1 - g**2),
                d_hidden * place.squashed * o * (1 - o),
            ],
            1,
        )
        sums = before.T @ place.x, before.T @ place.hidden, before.sum(0), before.sum(0)
        found = [old + new for old, new in zip(found, sums, strict=True)]
        inputs.insert(0, before @ w_x)
        d_hidden, d_cell = before @ w_h, d_cell * f
    return [torch.stack(inputs, 1), *found]


def of_layer(weights: Weights, index: int) -> Weights:
    start = f"{index}."
    return {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}


class frozen_buffers:  # noqa: N801 - a context
    """While inside, what happens to buffers is undone at the end."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._before = {n: b.clone() for n, b in self._module.named_buffers()}

    def __exit__(self, *_: object) -> None:
        for name, buffer in self._module.named_buffers():
            buffer.copy_(self._before[name])
