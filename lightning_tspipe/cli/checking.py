"""``tspipe check``: compare a pipeline with one device, in float64, step by step."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
from lightning.fabric import seed_everything
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.callbacks import DelayedTeacherUpdate
from lightning_tspipe.capture.held import generators_of
from lightning_tspipe.cli.modules import QUIET, Batches, Data, load
from lightning_tspipe.errors import ConfigurationError, TSPipeError
from lightning_tspipe.random_states import Generators
from lightning_tspipe.runtime.transport.replicas import default_group
from lightning_tspipe.schedules.registry import SCHEDULES, runs_ahead
from lightning_tspipe.strategy.setup.declared import are_named, find_networks
from lightning_tspipe.strategy.strategy import TSPipeStrategy

_TOLERANCE = 1e-9
_SEED = 0


class DifferenceError(TSPipeError):
    """The pipeline trains differently from one device."""


@dataclass(frozen=True)
class Options:
    """Options of ``tspipe check``.

    Attributes:
        target: FILE.py[:FUNCTION] that returns a LightningModule and its training data
        devices: devices of the pipeline
        steps: steps to compare
        schedule: the schedule
        microbatches: per call; more than 1 changes what BatchNorm computes
        student: trained submodules, if not `student`
        teacher: forward-only submodules, if not `teacher`
    """

    target: str
    devices: int = 2
    steps: int = 4
    schedule: str = field(default="tspipe", metadata={"choices": SCHEDULES})
    microbatches: int = 1
    student: list[str] | None = None
    teacher: list[str] | None = None


@dataclass(eq=False)
class Record(Callback):
    """Results of a run.

    Attributes:
        losses: One per step, on the rank that has them.
        weights: Parameters and buffers at the end.
        gradients: Gradients of all ranks before each optimizer step, by parameter.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self.losses.append(float(loss))

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        given = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        # Without zeros, which None equals.
        kept = {name: grad.detach().cpu().clone() for name, grad in given.items() if grad.any()}
        self.gradients.append(kept)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        engine = strategy.engine if isinstance(strategy, TSPipeStrategy) else None
        state = strategy.lightning_module_state_dict()
        if engine is not None and engine.shards.stays_spread:
            state = engine.shards.state_dict(engine.rank, engine.transport)
        if engine is not None:
            found = engine.transport.gather_object(self.gradients)
            steps = zip(*(found or []), strict=True)
            self.gradients = [{k: g for part in step for k, g in part.items()} for step in steps]
        self.weights = {name: tensor.detach().cpu().double() for name, tensor in state.items()}


def run(options: Options) -> None:
    """Train both ways and compare.

    Raises:
        DifferenceError: They differ; says where they differ first.
    """
    if options.steps < 1:
        raise ConfigurationError(f"--steps {options.steps}: must be at least 1")
    seed_everything(_SEED, verbose=False)
    module, data = load(options.target)
    module = module.double()
    batches = _first_batches(data, options.steps)
    strategy = TSPipeStrategy(
        student=options.student,
        teacher=options.teacher,
        schedule=cast("Any", options.schedule),
        num_microbatches=options.microbatches,
    )
    if are_named(module, strategy.options):
        find_networks(module, strategy.options)  # or say at once that it has none
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if is_first:  # the other processes of the pipeline run this command too
        _say(
            f"{options.steps} steps over {options.devices} devices, in float64, schedule "
            f"{options.schedule} ..."
        )
    actual = _train(module, batches, [], strategy=strategy, devices=options.devices)
    teacher = (strategy.found or find_networks(module, strategy.options)).teacher
    late = bool(teacher) and runs_ahead(options.schedule)
    if is_first:
        _say(f"{strategy.table}\nthe same on one device ...")
        callbacks = [DelayedTeacherUpdate(teacher=teacher)] if late else []
        seed_everything(_SEED, verbose=False)
        again, _ = load(options.target)  # not a copy: weight_norm cannot be copied
        draw_alike(again)
        with default_group(None):  # a loss that gathers would wait for the pipeline's other ranks
            expected = _train(again.double(), batches, callbacks, strategy="auto", devices=1)
        _say(compare(expected, actual))
        if late and strategy.pipelined.teacher_ran_ahead is not None:  # the step calls it
            _say("(the teacher is one update late in both: DelayedTeacherUpdate on one device)")


def compare(expected: Record, actual: Record) -> str:
    """Steps side by side, and the largest differences of gradients and weights.

    Raises:
        DifferenceError: They differ by more than rounding; the message contains the same lines.
    """
    lines = ["step  one device         pipelined          difference  of gradients"]
    found: list[tuple[str, float]] = []
    for step, (one, other) in enumerate(zip(expected.losses, actual.losses, strict=True)):
        difference = _relative(*torch.tensor([one, other], dtype=torch.float64))
        found.append((f"the losses of step {step}", difference))
        largest = 0.0
        if step < len(expected.gradients):  # fewer, if gradients are accumulated
            gradients = (run.gradients[step] for run in (expected, actual))
            name, largest = _largest_difference(*gradients)
            found.append((f"the gradients of {name} at update {step}", largest))
        lines.append(
            f"{step:4}  {one:<17.12g}  {other:<17.12g}  {difference:<10.1e}  {largest:.1e}"
        )
    name, largest = _largest_difference(expected.weights, actual.weights)
    found.append((f"the weights of {name}", largest))
    lines.append(f"weights after {len(expected.losses)} steps: {largest:.1e} at most, in {name}")
    for what, amount in found:
        if amount > _TOLERANCE:
            hint = (
                f"NOT the same: {what} differ by {amount:.1e}. What networks draw at random "
                "(dropout) differs from rank to rank, and BatchNorm sees micro-batches: check "
                "without them first"
            )
            raise DifferenceError("\n".join([*lines, hint]))
    return "\n".join([*lines, "the same"])


def _relative(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value; NaN is as far as can be."""
    if not one.numel():
        return 0.0
    gap = float((one - other).abs().max()) / max(float(one.abs().max()), 1e-12)
    return math.inf if math.isnan(gap) else gap


def _largest_difference(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]
) -> tuple[str, float]:
    """The tensor that differs most."""
    if expected.keys() != actual.keys():
        missing = sorted(expected.keys() ^ actual.keys())
        raise DifferenceError(f"only one of the two runs has {', '.join(missing)}")
    differences = {name: _relative(one, actual[name]) for name, one in expected.items()}
    return max(differences.items(), key=lambda item: item[1], default=("", 0.0))


def draw_alike(module: LightningModule) -> None:
    """Let each step draw the random numbers that it draws in a pipeline.

    Args:
        module: It is to be trained on one device, with the seed 0.
    """
    step, seeds = module.training_step, itertools.count(_SEED)
    held: list[Generators] = []

    @functools.wraps(step)
    def drawing(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the step
        if not held:  # hooks may have made some
            held.append(generators_of(module.modules()))
        with held[0].stream(next(seeds)):
            return step(*args, **kwargs)

    module.training_step = drawing  # type: ignore[method-assign]


def _train(
    module: LightningModule,
    batches: Batches,
    callbacks: Sequence[Callback],
    **arguments: Any,  # noqa: ANN401 - of the Trainer
) -> Record:
    record = Record()
    seed_everything(_SEED, verbose=False)
    # Schedules may begin with some epochs of warm-up; by hand, a step may count several times.
    limits: dict[str, Any] = {"max_epochs": 100, "max_steps": len(batches)}
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",  # of what configure_model builds, too
        callbacks=[*callbacks, record],
        **(limits if module.automatic_optimization else {"max_epochs": 1}),
        **QUIET,
        **arguments,
    )
    trainer.fit(module, batches)
    return record


def _first_batches(data: Data, number: int) -> Batches:
    loader: Any = data
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
    batches = list(islice(loader, number))
    if len(batches) < number:
        raise ConfigurationError(f"the training data has {len(batches)} batches, not {number}")
    return Batches(pytree.tree_map_only(Tensor, _as_double, batch) for batch in batches)


def _as_double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the command's output
