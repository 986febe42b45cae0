"""Why asynchronous training ends behind training on one device: one run, taken apart.

What a pipeline computes depends on which versions are read and not on when. So batches are trained
one after the other here, and each stage reads what its *reading* says: of the weights of s updates
ago, a prediction, and the weights as they are. Readings that no policy has tell causes apart::

                   forward                    backward
    consistent     prediction                 the same prediction
    unpredicted    weights of s updates ago   weights as they are
    half           half of the error of the prediction              weights as they are
    noise          an error of that size, in a random direction     weights as they are

How fast a direction of weights may be trained is limited by its curvature c, the second derivative
of the loss: SGD with momentum 0.9 on one device is stable as long as rate * c is below 3.8. With
gradients that are late it must be far smaller, see :func:`stable`; and large updates go to where
the limit is (Cohen et al., *Gradient Descent on Neural Networks Typically Occurs at the Edge of
Stability*, 2021).
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Optimizer

from benchmarks.asynchronous.tasks import NUM_STAGES, Classifier, Rate, Task, tasks_of
from benchmarks.asynchronous.train import accuracy, batches, data
from benchmarks.environment import environment_of
from lightning_tspipe.runtime.weights.prediction import predicted_update

CURVATURE_EPOCH = 2
"""After which the curvatures are looked at: behind the warm-up, before the rate has fallen much."""
CURVATURE_SAMPLES, POWER_STEPS = 200, 8
NUM_TESTS = 4_000
"""More images to test with than the arms', as differences of a few seeds are to be told apart."""

MOMENTA = (0.9, 0.5)

Values = Mapping[str, Tensor]
Read = tuple[Tensor, Tensor]
"""What the forward reads, and the backward."""


class Versions(NamedTuple):
    """Of one parameter.

    Attributes:
        old: As it was s updates ago, when the forward ran.
        guess: The old one moved on by s predicted updates.
        now: As it is when the backward runs.
    """

    old: Tensor
    guess: Tensor
    now: Tensor


def _noise(versions: Versions, generator: torch.Generator) -> Read:
    _, guess, now = versions
    direction = torch.randn(now.shape, generator=generator)
    return now + direction * ((guess - now).norm() / direction.norm()), now


READINGS: Mapping[str, Callable[[Versions, torch.Generator], Read]] = {
    "gpipe1": lambda v, _: (v.now, v.now),
    "pipeoptim": lambda v, _: (v.guess, v.now),
    "pipedream": lambda v, _: (v.old, v.old),
    "consistent": lambda v, _: (v.guess, v.guess),
    "unpredicted": lambda v, _: (v.old, v.now),
    "half": lambda v, _: (v.now + 0.5 * (v.guess - v.now), v.now),
    "noise": _noise,
}


class Case(NamedTuple):
    """What is trained.

    Attributes:
        reading: One of ``READINGS``.
        momentum: Of SGD; the rate goes with it, so that updates add up to the same.
    """

    reading: str
    momentum: float = MOMENTA[0]

    def rate_of(self, task: Task) -> Rate:
        """The task's rate, for this momentum."""
        factor = (1 - self.momentum) / (1 - MOMENTA[0])
        return Rate(task.rate.peak * factor, task.rate.warmup)


CASES = [
    *map(Case, READINGS),
    *(Case(*c) for c in product(("gpipe1", "pipeoptim", "pipedream"), MOMENTA[1:])),
]


class Outcome(NamedTuple):
    """Of one run.

    Attributes:
        train_loss: Mean cross-entropy of the training samples, in evaluation mode, not changed.
        test_accuracy: Share of the test samples.
        rate_times_curvature: For each stage from the input on, the largest, after epoch 2.
    """

    train_loss: float
    test_accuracy: float
    rate_times_curvature: list[float]


def measure(options: argparse.Namespace) -> int:
    """Compute the limits, train each reading with the ResNet, print and write."""
    torch.set_num_threads(1)
    task = replace(tasks_of(options.batch_size)["resnet"], num_tests=NUM_TESTS)
    limits = {
        f"{name} {momentum:g}": [
            stable(steps, momentum, predicts=name == "pipeoptim") for steps in range(NUM_STAGES)
        ]
        for momentum, name in product(MOMENTA, ("pipeoptim", "pipedream"))
    }
    print(text := limits_table(limits))
    rows = []
    for case in CASES if options.images is not None else ():
        outcomes = [trained(task, case, seed, options.images) for seed in options.seeds]
        curvatures = zip(*(outcome.rate_times_curvature for outcome in outcomes), strict=True)
        row = {
            **case._asdict(), "seeds": options.seeds,
            "train_loss": mean(outcome.train_loss for outcome in outcomes),
            "test_accuracy": mean(outcome.test_accuracy for outcome in outcomes),
            "rate_times_curvature": [mean(values) for values in curvatures],
        }  # fmt: skip
        rows.append(row)
        print(line := _line(row), flush=True)
        text += f"\n{line}"
    if options.json is not None:
        content = {
            "environment": environment_of(("torch", "torchvision")),
            "settings": {
                "batch_size": task.batch_size, "rate": str(task.rate), "num_tests": NUM_TESTS
            },
            "limits": limits, "rows": rows,
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.json.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    return 0


def stable(steps: int, momentum: float, *, predicts: bool) -> float:
    """The largest rate times curvature at which SGD doesn't diverge, on a parabola.

    With a rate of 1: v becomes momentum v + c x, and w becomes w - v, where x is the w of ``steps``
    updates ago, with a prediction less ``steps`` times the v of then. That is a linear map of the
    last weights and v's; it is stable as long as no eigenvalue is outside the unit circle.

    Args:
        steps: Updates between forward and backward.
        momentum: Of the optimizer.
        predicts: Whether the forward reads weights moved on by them.
    """

    def radius(curvature: float) -> float:
        size = steps + 1
        read = torch.zeros(2 * size, dtype=torch.float64)
        read[steps], read[size + steps] = 1.0, -float(steps * predicts)
        map_ = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
        for place in range(1, size):
            map_[place, place - 1] = map_[size + place, size + place - 1] = 1.0
        map_[size] = curvature * read
        map_[size, size] += momentum
        map_[0] = -map_[size]
        map_[0, 0] += 1.0
        return float(torch.linalg.eigvals(map_).abs().max())

    curvature, factor = 1e-3, 1.005
    while radius(curvature * factor) <= 1 + 1e-9:
        curvature *= factor
    return curvature


def limits_table(limits: Mapping[str, list[float]]) -> str:
    """A line for each policy, a column for each number of updates."""
    lines = ["largest stable rate * curvature, by updates between forward and backward"]
    lines.append(f"{'by momentum':<14}" + "".join(f"{steps:>7}" for steps in range(NUM_STAGES)))
    for name, values in limits.items():
        lines.append(f"{name:<14}" + "".join(f"{value:7.3f}" for value in values))
    lines.append(
        "trained     momentum  loss   accuracy  rate * curvature of the stages, from the input"
    )
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    curvatures = "".join(f"{value:7.3f}" for value in row["rate_times_curvature"])
    loss, share = row["train_loss"], row["test_accuracy"]
    return f"{row['reading']:<11} {row['momentum']:<8g}  {loss:.3f}  {share:.3f}   {curvatures}"


def trained(task: Task, case: Case, seed: int, folder: Path) -> Outcome:
    """One run.

    Args:
        task: With images.
        case: How.
        seed: Of the weights, the order of the data, its changes, and the noise.
        folder: The images.
    """
    reading, rate_schedule = READINGS[case.reading], case.rate_of(task)
    (inputs, labels), test = data(task, folder)
    torch.manual_seed(seed)
    module = Classifier(task)
    epochs = list(batches(inputs, labels, task, seed))
    optimizer = task.optimizer(module.parameters(), rate_schedule.peak)
    schedule = rate_schedule.schedule(optimizer, len(epochs[0]), task.epochs)
    (group,) = optimizer.param_groups
    group["momentum"] = case.momentum
    parameters = dict(module.student.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    curvatures: list[float] = []
    for number, epoch in enumerate(epochs, 1):
        history: deque[tuple[Values, Values]] = deque(maxlen=NUM_STAGES)
        for batch in epoch:
            history.append(_version(optimizer, parameters, group))
            forward, backward = _reads(history, reading, generator)
            gradients = _gradients(module, batch, forward, backward)
            for name, parameter in parameters.items():
                parameter.grad = gradients[name]
            optimizer.step()
            schedule.step()
        if number == CURVATURE_EPOCH:
            rate = group["lr"]
            curvatures = [rate * value for value in _curvatures(module, (inputs, labels))]
    network = module.student.eval()
    with torch.no_grad():
        losses = [
            functional.cross_entropy(network(x), y, reduction="sum")
            for x, y in zip(inputs.split(200), labels.split(200), strict=True)
        ]
    return Outcome(float(sum(losses)) / len(labels), accuracy(module, test), curvatures)


def _version(
    optimizer: Optimizer, parameters: Values, group: Mapping[str, Any]
) -> tuple[Values, Values]:
    """The weights, and what one update is expected to subtract from them."""
    updates = {}
    for name, parameter in parameters.items():
        update = predicted_update(optimizer, parameter, group)
        updates[name] = torch.zeros_like(parameter) if update is None else update.clone()
    return {name: p.detach().clone() for name, p in parameters.items()}, updates


def _reads(
    history: deque[tuple[Values, Values]],
    reading: Callable[[Versions, torch.Generator], Read],
    generator: torch.Generator,
) -> tuple[Values, Values]:
    """What the forward of each stage reads, as leaves of a graph, and what the backward reads."""
    forward: dict[str, Tensor] = {}
    backward: dict[str, Tensor] = {}
    for name, now in history[-1][0].items():
        steps = min(len(history) - 1, NUM_STAGES - 1 - int(name.split(".")[0]))
        weights, updates = history[-1 - steps]
        versions = Versions(weights[name], weights[name] - steps * updates[name], now)
        value, backward[name] = reading(versions, generator)
        forward[name] = value.clone().requires_grad_()
    return forward, backward


def _gradients(
    module: Classifier, batch: tuple[Tensor, Tensor], forward: Values, backward: Values
) -> Values:
    """Of one batch. In the place of weights autograd saves names, which the backward looks up."""
    names = {value.data_ptr(): name for name, value in forward.items()}

    def pack(saved: Tensor) -> Callable[[], Tensor]:
        name = names.get(saved.data_ptr())
        if name is None:
            return lambda: saved
        return partial(backward[name].as_strided, saved.shape, saved.stride())

    with saved_tensors_hooks(pack, lambda made: made()):
        output = functional_call(module.student, dict(forward), (batch[0],))
        loss = functional.cross_entropy(output, batch[1])
    gradients = torch.autograd.grad(loss, list(forward.values()))
    return dict(zip(forward, gradients, strict=True))


def _curvatures(module: Classifier, samples: tuple[Tensor, Tensor]) -> list[float]:
    """Of each stage's weights alone: the eigenvalue of the second derivative that is the largest.

    By power iteration, so the largest in absolute value.
    """
    module = deepcopy(module)
    every = max(1, len(samples[1]) // CURVATURE_SAMPLES)
    loss = module.training_step((samples[0][::every], samples[1][::every]))
    found = []
    for stage in module.student:
        weights = list(stage.parameters())
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        vector, value = [torch.randn_like(weight) for weight in weights], 0.0
        for _ in range(POWER_STEPS):
            length = sum(float(part.square().sum()) for part in vector) ** 0.5
            vector = [part / length for part in vector]
            change = torch.autograd.grad(slopes, weights, vector, retain_graph=True)
            value = sum(float((a * b).sum()) for a, b in zip(change, vector, strict=True))
            vector = [part.detach() for part in change]
        found.append(value)
    return found
