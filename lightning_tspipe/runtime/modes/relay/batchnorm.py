"""BatchNorm over a batch that several ranks share: the statistics of all samples, on each of them.

torch's SyncBatchNorm needs a GPU and a process group. This needs a function that exchanges a small
tensor; the layers stay what they are, so that names and checkpoints don't change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_tspipe.networks import swap

Exchange = Callable[[Tensor], list[Tensor]]
"""Gives everybody's tensor, in the same order on all."""


@contextmanager
def shared_statistics(modules: Iterable[nn.Module], exchange: Exchange) -> Iterator[None]:
    """While inside, BatchNorm layers in train mode normalise by the samples of all ranks.

    Args:
        modules: The modules whose layers, at any depth, are meant.
        exchange: Called once by each layer, and once in its backward, on all ranks alike.
    """
    layers = [
        layer
        for module in modules
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    ]
    with swap.forwards_replaced({layer: partial(_forward, layer, exchange) for layer in layers}):
        yield


def _forward(layer: _BatchNorm, exchange: Exchange, x: Tensor) -> Tensor:
    normalised, mean, variance, count = _Normalise.apply(x, layer.eps, exchange)
    _track(layer, mean, variance, count)
    result: Tensor = normalised
    if layer.affine:
        weight, bias = (_like(p, x).to(x.dtype) for p in (layer.weight, layer.bias))
        result = normalised * weight + bias
    return result


@torch.no_grad()
def _track(layer: _BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    if not layer.track_running_stats or layer.running_mean is None:
        return
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    factor: Any = layer.momentum
    if factor is None:  # reckoned on the device
        factor = 1.0 / layer.num_batches_tracked.double()
    unbiased = variance * (count / (count - 1).clamp(min=1))
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        weight = factor.to(running.dtype) if isinstance(factor, Tensor) else factor
        running.lerp_(new.to(running.dtype), weight)


class _Normalise(Function):
    """Zero mean and unit variance over the samples of all ranks."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, eps: float, exchange: Exchange
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x if x.dtype is torch.float64 else x.float()
        own = wide.new_full((1,), x.numel() / max(1, x.shape[1]))
        mean = wide.sum(dims) / own.clamp(min=1)
        deviation = (wide - _like(mean, x)).square().sum(dims)
        parts = torch.stack(exchange(torch.cat([own, mean, deviation])))
        counts, means, deviations = parts.split([1, x.shape[1], x.shape[1]], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        # Moments of parts, put together (Chan et al., 1983).
        variance = (deviations + counts * (means - mean).square()).sum(0) / count
        scale = torch.rsqrt(variance + eps)
        normalised = (wide - _like(mean, x)) * _like(scale, x)
        ctx.save_for_backward(normalised, scale, count)
        ctx.exchange, ctx.dims = exchange, dims
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised.to(x.dtype), mean, variance, count

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        normalised, scale, count = ctx.saved_tensors
        gradient = gradients[0].to(normalised.dtype)
        sums = torch.stack([gradient.sum(ctx.dims), (gradient * normalised).sum(ctx.dims)])
        total = torch.stack(ctx.exchange(sums)).sum(0) / count
        shift, slope = _like(total[0], gradient), _like(total[1], gradient)
        found = (gradient - shift - normalised * slope) * _like(scale, gradient)
        return found.to(gradients[0].dtype), None, None


def _like(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel, to combine with ``x``."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
