"""Cached frozen layers of a network on ordinary strategies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.caching import measure
from lightning_tspipe.caching.absent import is_loaded
from lightning_tspipe.callbacks.cached_layers import CachedLayers
from lightning_tspipe.callbacks.common import replaced
from lightning_tspipe.callbacks.determinism import (
    check_deterministic,
    check_unchanged_outputs,
    tensors_in,
    versions_of,
)
from lightning_tspipe.callbacks.fit_cache import FitCache
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.prefix import DividedNetwork, Middle

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class CachedForward(CachedLayers):
    """Replaces a network's ``forward`` by one that reads what its frozen atoms returned.

    Args:
        shared: The cache of this fit.
        trainer: The trainer.
        network: The network; its ``forward`` is replaced until :meth:`close`.
        name: Name of the network, for messages.
        always: Cache without asking whether it is worth it.
    """

    def __init__(
        self, shared: FitCache, trainer: Trainer, network: nn.Module, name: str, *, always: bool
    ) -> None:
        super().__init__(shared, trainer, name, always=always)
        self._divided: DividedNetwork | None = None
        self._versions: list[tuple[int, int]] = []
        self._measured = 0
        self._batch: Any = None
        self._is_within = False
        self._num_calls = 0
        self._forward = network.forward
        self._network = network
        self._undo = replaced(network, "forward", self._call)

    def close(self) -> None:
        """Give the network its own ``forward`` back."""
        self._undo()

    @override
    def start_epoch(self) -> None:
        self._versions = []

    @contextmanager
    def within(self, batch: Any) -> Iterator[None]:
        """Tell which batch of samples the network runs on while a training step lasts."""
        self._batch, self._is_within, self._num_calls = batch, True, 0
        try:
            yield
        finally:
            self._batch, self._is_within = None, False

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The network's ``forward``; while it runs, the network has its own, to be traced."""
        above = vars(self._network)[
            "forward"
        ]  # perhaps a wrapper of this one, by heads for instance
        self._undo()
        try:
            return self._run(*args, **kwargs)
        finally:
            self._undo = replaced(self._network, "forward", self._call)
            vars(self._network)["forward"] = above

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._shared.cache is None or not self._is_within:
            return self._forward(*args, **kwargs)
        if all(p.requires_grad for p in self._network.parameters()):
            return self._forward(*args, **kwargs)
        if self._divided is None:
            self._divided = DividedNetwork(self._network, self._name, args, kwargs)
        divided = self._divided
        number = divided.num_frozen()
        if number == 0:
            return self._forward(*args, **kwargs)
        self._num_calls += 1
        if self._num_calls > 1:
            raise ConfigurationError(
                f"training_step calls {self._name!r} several times, and AutoCache has one entry "
                "per sample: several views usually mean random augmentation. Train without it"
            )
        middle = divided.start(args, kwargs)
        self._update(divided, number)
        if not self._is_worth_it(divided.tensors(number), number, middle):
            return self._forward(*args, **kwargs)
        return divided.end(divided.piece(number, len(divided.atoms))(self._read(middle)))

    def _update(self, divided: DividedNetwork, number: int) -> None:
        """Make new segments if other atoms are frozen, or their weights have changed."""
        versions = versions_of(divided.tensors(number))
        if versions == self._versions and number == self._shared.cuts[-1]:
            return
        self._versions = versions
        self._divide(
            number,
            lambda start, stop: divided.tensors(stop)[len(divided.tensors(start)) :],
            divided.piece,
        )
        if self._is_verified:
            self._let_skip()

    def _whole(self, middle: Middle) -> Middle:
        for segment in self._segments:
            middle = segment.function(middle)
        return middle

    def _is_worth_it(self, tensors: list[Tensor], number: int, middle: Middle) -> bool:
        """Decide at the first batch with these frozen layers; on all ranks alike.

        What was worth it for fewer layers is so for more.
        """
        if not self.is_on and self._measured != number:
            self._measured = number
            check_deterministic(self._name, lambda: self._whole(middle), tensors)
            worth = measure(self._whole, middle, **self._shared.settings.how)
            worth = replace(worth, load=self._shared.seconds_saved)
            worth = self._trainer.strategy.broadcast(worth)
            self._decide(worth, speaks=self._trainer.is_global_zero)
        return bool(self.is_on)

    def _read(self, middle: Middle) -> Middle:
        ids = self._shared.ids_of(self._batch)
        is_first = not self._is_verified and any(self._cache.kept(ids, self._segments))
        cached: Middle = self._cache.outputs(ids, middle, self._segments)
        if is_first:
            if all(map(is_loaded, tensors_in(middle))):
                with torch.no_grad():
                    check_unchanged_outputs(self._name, cached, self._whole(middle), self._dtype)
            self._is_verified = True
            self._let_skip()
        return cached
