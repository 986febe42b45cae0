"""BatchNorm over micro-batches: normalise with each one's statistics, update the running ones once.

A call that runs as u micro-batches would otherwise move the running statistics u times. As in
GPipe (Huang et al., NeurIPS 2019, section 2.2) and TSPipe (Lim et al., ICML 2022), the layers
normalise with the statistics of the micro-batch; the running statistics are updated once per call,
with the mean and the unbiased variance of all samples of the call together. A layer that a network
runs several times is updated as often.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tspipe.networks.swap import StandIn, forwards_replaced


def is_deferred(layer: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether the running statistics of a layer are updated once per call."""
    return isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)


class DeferredStatistics:
    """Collects the statistics of micro-batches and updates the running ones once per call.

    Layers that are in eval mode or track nothing behave as always; ``SyncBatchNorm`` is left alone.

    Args:
        modules: The modules whose BatchNorm layers, at any depth, are meant.

    Example:
        >>> layer = nn.BatchNorm1d(3)
        >>> statistics = DeferredStatistics([layer])
        >>> for micro_batch in torch.ones(8, 3).chunk(2):
        ...     with statistics.accumulate():
        ...         output = layer(micro_batch)
        >>> statistics.commit()
        >>> layer.running_mean, layer.num_batches_tracked
        (tensor([0.1000, 0.1000, 0.1000]), tensor(1))
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        layers = {child: None for module in modules for child in module.modules()}
        self._layers = [_Layer(layer) for layer in layers if is_deferred(layer)]
        self._collected: dict[Hashable, Observed] = {}

    def accumulate(self, call: Hashable = None) -> AbstractContextManager[None]:
        """Within: forwards in train mode collect statistics and leave the running ones alone.

        Args:
            call: What the statistics belong to; several may be collected at a time.
        """
        return self._routed(self._collected.setdefault(call, {}))

    def ignored(self) -> AbstractContextManager[None]:
        """Within: forwards in train mode leave the running statistics alone."""
        return self._routed({})

    def __bool__(self) -> bool:
        """Whether there is anything to collect."""
        return bool(self._layers)

    @contextmanager
    def _routed(self, observed: Observed) -> Iterator[None]:
        active = [layer for layer in self._layers if layer.is_tracking()]
        for layer in active:
            layer.observed, layer.run = observed, 0
            layer.forward = layer.module.forward
        with forwards_replaced({layer.module: layer.observe for layer in active}):
            yield

    def commit(self, call: Hashable = None) -> None:
        """Update the running statistics with what a call collected, as one batch; forget it."""
        groups: dict[tuple[int, int], list[tuple[_Layer, list[Part]]]] = {}
        for layer, parts in self._collected.pop(call, {}).items():
            for run in range(1 + max(part[3] for part in parts)):
                own = [part for part in parts if part[3] == run]
                groups.setdefault((run, len(own)), []).append((layer, own))
        with torch.no_grad():
            for _, layers in sorted(groups.items(), key=lambda group: group[0]):
                merged = combine_statistics([parts for _, parts in layers])
                for (layer, _), (mean, variance) in zip(layers, merged, strict=True):
                    layer.update(mean, variance)

    def discard(self, call: Hashable = None) -> None:
        """Forget what a call collected."""
        self._collected.pop(call, None)

    def collected(self, call: Hashable) -> dict[nn.Module, list[Part]]:
        """What a call has collected and not committed, by layer."""
        return {layer.module: parts for layer, parts in self._collected.get(call, {}).items()}

    def put(self, call: Hashable, parts: Mapping[nn.Module, list[Part]]) -> None:
        """As if a call had collected this; layers of other ranks are left out."""
        self._collected[call] = {
            layer: parts[layer.module]
            for layer in self._layers
            if layer.module in parts and layer.is_here()
        }


class _Layer(StandIn):
    """One BatchNorm layer, and where its statistics go meanwhile.

    Its forward is replaced by a method of one and the same object each time: with anything made
    anew, a compiled stage would be compiled once more in each call.
    """

    module: _BatchNorm

    def __init__(self, module: _BatchNorm) -> None:
        super().__init__(module)
        self.observed: Observed = {}
        self.run = 0

    def is_here(self) -> bool:
        """Whether this rank holds the running statistics."""
        running = self.module.running_mean
        return running is not None and not running.is_meta

    def is_tracking(self) -> bool:
        module = self.module
        return module.training and module.track_running_stats and module.running_mean is not None

    def observe(self, x: Tensor) -> Tensor:
        """Run the layer, whatever its class does in ``forward``, and note the statistics."""
        # With momentum 1 the kernel writes this micro-batch's statistics into the running buffers:
        # lend it buffers of ours. They start at zero since it computes 0 * old + 1 * new.
        module = self.module
        if not module.training:  # for this call
            return self.forward(x)  # type: ignore[no-any-return]
        buffers, momentum = module._buffers, module.momentum  # noqa: SLF001 - assigning by name is slow
        lent = {
            "running_mean": torch.zeros_like(buffers["running_mean"]),  # type: ignore[arg-type]
            "running_var": torch.zeros_like(buffers["running_var"]),  # type: ignore[arg-type]
            "num_batches_tracked": None,
        }
        own = {name: buffers[name] for name in lent}
        buffers.update(lent)
        module.momentum = 1.0
        try:
            output: Tensor = self.forward(x)
        finally:
            buffers.update(own)
            module.momentum = momentum
        count = x.numel() // x.shape[1]
        part = (count, lent["running_mean"], lent["running_var"], self.run)
        self.observed.setdefault(self, []).append(part)  # type: ignore[arg-type]
        self.run += 1
        return output

    def update(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards these."""
        module = self.module
        module.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        momentum: Any = module.momentum
        if momentum is None:  # cumulative average, reckoned on the device
            momentum = 1.0 / module.num_batches_tracked.double()  # type: ignore[union-attr]
        for running, new in ((module.running_mean, mean), (module.running_var, variance)):
            assert isinstance(running, Tensor)
            # Like torch's own update, invisible to autograd: a backward that is still to come saved
            # the running statistics but does not read them.
            # In the order of its arithmetic too, so that the last bit is the same.
            running.data.mul_(1.0 - momentum).add_(new * momentum)


# Of a micro-batch: count, mean and unbiased variance, and in which of the layer's runs.
Part = tuple[int, Tensor, Tensor, int]
Observed = dict[_Layer, list[Part]]


def combine_statistics(layers: Sequence[Sequence[Part]]) -> list[tuple[Tensor, Tensor]]:
    """Per layer, the statistics of a batch of which those of the micro-batches are known.

    Computed in float64 as in Chan, Golub, LeVeque (1979), all parts and all layers at once: the
    squared deviations of the whole are those of the parts around their means, plus those of the
    means around theirs.

    Args:
        layers: For each layer and part: count, mean and unbiased variance, of shape (channels,),
            of one run. All layers have the same number of parts and live on one device.

    Returns:
        For each layer mean and unbiased variance, shape (channels,).
    """
    if len(layers[0]) == 1:
        return [(mean, variance) for ((_, mean, variance, _),) in layers]
    rows = list(zip(*layers, strict=True))  # rows[part][layer]
    channels = [len(mean) for _, mean, *_ in rows[0]]
    means = torch.stack([torch.cat([part[1] for part in row]) for row in rows]).double()
    variances = torch.stack([torch.cat([part[2] for part in row]) for row in rows]).double()
    counts = torch.tensor([[part[0] for part in row] for row in rows], dtype=torch.float64)
    counts = counts.repeat_interleave(torch.tensor(channels), dim=1, output_size=sum(channels))
    counts = counts.to(means.device, non_blocking=True)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    squares = ((counts - 1) * variances + counts * (means - mean).square()).sum(0)
    variance = squares / (total - 1)
    return list(zip(mean.split(channels), variance.split(channels), strict=True))
