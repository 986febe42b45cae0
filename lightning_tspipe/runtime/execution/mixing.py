"""Whether networks mix the samples of a batch, so that micro-batches of it give other numbers.

A micro-batch goes through the pipeline twice, the second time with another first sample::

    a  b  c  ──► networks ──►  f(a)  f(b)  f(c)
    c  b  c  ──► networks ──►  f(c)  f(b)  f(c)       those behind the first must not have changed

What mixes samples is a mean over the batch, say, or attention that takes another dimension for the
batch. BatchNorm does, too, but is known to: here it is in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tspipe.capture.plan import Inputs, TensorSpec
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.random_states import random_stream
from lightning_tspipe.runtime.execution.evaluation import Forwards
from lightning_tspipe.runtime.execution.executor import StepContext
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.stages.captured import StepUnits, split_sizes
from lightning_tspipe.runtime.stages.network import ChainNetwork

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Of the largest number: a mixture of experts multiplies other rows together each time."""
_OF_HALF = 0.05
Values = dict[int, list[Tensor]]
"""What each call gave, on the rank with the loss."""


class Mixing(Forwards):
    """Looks whether the networks of a training step mix samples; every rank makes one.

    Args:
        engine: The engine, before its first step.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        whole, self._number = engine.whole, engine.whole.num_microbatches
        placement = replace(whole, num_microbatches=1, recomputed=frozenset(), split=frozenset())
        super().__init__(engine, engine.captured.whole, placement)
        self._runner = engine.losses.runner
        # There is no loss, and what the networks get is given.
        self._stages.handlers |= {Op.LOSS: self._read, Op.PROLOGUE: lambda *_: None}

    def find(self, step: Step, batch: Any) -> str:
        """Which call mixes samples, and where the step makes it; empty if none does.

        Args:
            step: The step.
            batch: Its first batch, the same on all ranks.

        Returns:
            The same on all ranks of all replicas.
        """
        engine, (seed, _) = self._engine, self._engine.position
        ones = others = None
        if engine.is_data_rank:
            with random_stream(seed):
                given = self._runner.inputs(step, batch, seed, effects=False)
                ones = self._of_each(self._samples, given)
                others = self._of_each(_with_another, ones)
        with _batchnorm_at_rest(self._captured.networks.values()):
            before, after = (self._run(inputs, seed) for inputs in (ones, others))
        told = ""
        if engine.is_loss_rank:
            differ = (call for call in before if not _are_same(before[call], after[call]))
            call = next(differ, None)
            told = "" if call is None else self._runner.name_of(call, step, batch, seed)
            told = next(filter(None, engine.here.replicas.gather(told)), "")
        result: str = engine.transport.broadcast_object(told, LOSS_RANK)
        return result

    def _of_each(self, function: Callable[[Tensor, bool], Tensor], inputs: Inputs) -> Inputs:
        """Of all inputs; and whether it has samples, or is one that all samples have."""
        plan = self._captured.plan
        kinds = [plan.route(call).arguments.tensors for call in range(len(plan.calls))]
        return tuple(
            tuple(function(x, kind.is_whole) for x, kind in zip(tensors, own, strict=True))
            for tensors, own in zip(inputs, kinds, strict=True)
        )

    def _samples(self, tensor: Tensor, is_whole: bool) -> Tensor:
        """As many as a micro-batch has; made up, where all are alike or are not there yet."""
        samples = tensor[: max(2, split_sizes(len(tensor), self._number)[0])].detach()
        are_alike = samples.dtype.is_floating_point and bool((samples == samples[:1]).all())
        return torch.randn_like(samples) if are_alike and not is_whole else samples

    def _run(self, inputs: Inputs | None, seed: int) -> Values:
        """The networks on some samples, which the data rank has."""
        engine, transport = self._engine, self._engine.transport
        specs = None if inputs is None else [tuple(map(TensorSpec.of, each)) for each in inputs]
        with waiting("the start of a step"):
            specs = transport.broadcast_object(specs, self._placement.data_rank)
        units = StepUnits(self._captured, self._placement, specs)
        given = {} if inputs is None else {0: inputs}
        context = StepContext(0, self._program, {0: units}, given)
        with random_stream(seed):
            self._stages.post_receives(context)
            self._stages.run(context, self._program.ranks[engine.rank])
        self._finish(0)
        found: Values = context.result or {}
        return found

    def _read(self, context: StepContext, _: Action) -> bool:
        """Where the loss would be: keep what it would read, without each first sample."""
        units, plan = context.units[0], self._captured.plan
        context.result = {call: [] for call in range(len(plan.calls))}
        for call, tensors in context.result.items():
            size = units.inputs[call][0].shape[0]
            for ref in plan.route(call).used if size else ():
                value = self._stages.value(0, units, call, ref)
                if value.dim():  # micro-batches of a loss of its own are refused for that
                    tensors.append(value[len(value) // size :])
        return False


def _with_another(samples: Tensor, is_whole: bool) -> Tensor:
    """The same samples, with another one first."""
    return samples if is_whole else torch.cat([samples[-1:], samples[1:]])


def _are_same(ones: list[Tensor], others: list[Tensor]) -> bool:
    for one, other in zip(ones, others, strict=True):
        tolerance = _TOLERANCES.get(one.dtype, _OF_HALF) if one.dtype.is_floating_point else 0
        largest = one.detach().abs().nan_to_num().amax().item() if one.numel() else 0
        if not torch.allclose(one, other, rtol=0, atol=tolerance * largest, equal_nan=True):
            return False
    return True


@contextmanager
def _batchnorm_at_rest(networks: Iterable[ChainNetwork]) -> Iterator[None]:
    layers = {m for network in networks for m in network.modules if isinstance(m, _BatchNorm)}
    active = [layer for layer in layers if layer.training]
    for layer in active:
        layer.training = False
    try:
        yield
    finally:
        for layer in active:
            layer.training = True
