"""Commands of optimization by hand, which every rank carries out on what it owns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.training.optimizers import (
    parameters_of,
    plain_optimizer,
    set_hyperparameters,
)

Command = tuple[Any, ...]
"""A name, which is that of a method below, and its arguments."""

END: Command = ("end",)


class Commands:
    """The commands, on one rank.

    Args:
        run: The run.

    Attributes:
        student: The parameters of the pipelined networks that are trained, also those of others.
        waiting: The optimizers that made no step since the last backward: gradients may add up.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.student: list[nn.Parameter] = []
        self.waiting: set[int] = set()

    def attach(self) -> None:
        """The stages have their places."""
        self.waiting = set()
        blocks = [self.module.get_submodule(name) for name in self.engine.names.student]
        self.student = [parameter for block in blocks for parameter in block.parameters()]

    @property
    def engine(self) -> PipelineEngine:
        """The pipeline; a relay's engine has no commands to follow."""
        return cast("PipelineEngine", self._run.engine)

    @property
    def module(self) -> Any:
        """The LightningModule."""
        return self._run.module

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers as the user gets them: they count steps and run hooks."""
        optimizers: list[Any] = self._run._lightning_optimizers  # noqa: SLF001
        return optimizers

    def follow(self) -> None:
        """On the other ranks: do what the loss rank tells, until its step is over."""
        recorder = self._run.recorder
        while True:
            started = time.perf_counter()
            commands = self._run.transport.broadcast_object(None, LOSS_RANK)
            recorder.paused("receive", started)
            for command in commands:
                if command == END:
                    return
                self.carry_out(command)

    def carry_out(self, command: Command) -> Any:
        """Do it, on this rank."""
        name, *args = command
        return getattr(self, name)(*args)

    def before_backward(self) -> None:
        """A backward begins on the loss rank."""
        loss = torch.zeros((), device=self._run.root_device)
        self._run.pre_backward(loss)
        self._run.precision_plugin.pre_backward(loss, self.module)

    def backward(
        self, reached: bool, toggled: int | None, reduce: bool, num_backwards: int
    ) -> None:
        """Through the pipeline, from the networks' outputs to their parameters.

        Args:
            reached: Whether there are gradients at the outputs; if not, parameters have none
                afterwards either (and not zeros, by which an optimizer would take a step).
            toggled: The optimizer whose parameters alone are to have gradients; None: all.
            reduce: Whether the gradients become the means over the replicas.
            num_backwards: How many backwards of the user added up.
        """
        with (
            _gradients_kept(self._untouched(reached, toggled)),
            torch.enable_grad(),
            self._run.precision_plugin.forward_context(),
        ):
            self.engine.backward(lambda: None, reduce=reduce)
        self.after_backward(num_backwards)

    def after_backward(self, num_backwards: int = 1) -> None:
        """Gradients are there."""
        self.waiting = set(range(len(self.optimizers)))
        loss = torch.zeros((), device=self._run.root_device)
        for _ in range(num_backwards):
            self._run.precision_plugin.post_backward(loss, self.module)
            self._run.post_backward(loss)

    def _untouched(self, reached: bool, toggled: int | None) -> list[nn.Parameter]:
        """The parameters of this rank whose gradients stay what they are."""
        here = [parameter for parameter in self.student if not parameter.is_meta]
        if not reached:
            return here
        if toggled is None:
            return []
        known = {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}
        off = known - set(map(id, parameters_of(self.optimizers[toggled])))
        return [parameter for parameter in here if id(parameter) in off]

    def step(
        self, index: int, raw: bool, kwargs: dict[str, Any], groups: list[dict[str, Any]]
    ) -> Any:
        """An optimizer's step.

        Args:
            index: Which optimizer.
            raw: Whether past Lightning's wrapper, without hooks and counters.
            kwargs: What the user gave to ``step``.
            groups: The hyperparameters on the loss rank, where the user may have changed them.
        """
        self.waiting.discard(index)
        optimizer = self.optimizers[index]
        plain = plain_optimizer(optimizer)
        set_hyperparameters(plain, groups)
        return (plain if raw else optimizer).step(**kwargs)

    def zero_grad(self, index: int | None, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Of an optimizer, or of the module."""
        owner = self.module if index is None else self.optimizers[index]
        owner.zero_grad(*args, **kwargs)

    def clip(self, index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """``clip_gradients`` of the module."""
        self.module.clip_gradients(plain_optimizer(self.optimizers[index]), *args, **kwargs)

    def schedule(self, index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A step of a scheduler."""
        self._run.lr_scheduler_configs[index].scheduler.step(*args, **kwargs)


@contextmanager
def _gradients_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
