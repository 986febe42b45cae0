"""The frozen beginning of a network while it trains: read where it is known, else computed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_tspipe.caching import Boundary, Segment, Worth, fingerprint, measure
from lightning_tspipe.caching.absent import is_loaded
from lightning_tspipe.callbacks.fixed import (
    refuse_other,
    refuse_random,
    tensors_in,
    versions_of,
)
from lightning_tspipe.callbacks.shared_cache import SharedCache, replaced
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.prefix import DividedNetwork, Middle

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger("lightning_tspipe")


class FrozenFront:
    """The frozen beginning of a network, while a fit lasts.

    Args:
        shared: The cache of this fit.
        trainer: The trainer.
        network: The network; its ``forward`` is replaced until :meth:`close`.
        name: Of the network.
        always: Cache without asking whether it is worth it.

    Attributes:
        worth: What was measured.
        is_on: Whether activations are cached; None before it was measured.
    """

    def __init__(
        self,
        shared: SharedCache,
        trainer: Trainer,
        network: nn.Module,
        name: str,
        *,
        always: bool,
    ) -> None:
        self.worth: Worth | None = None
        self.is_on: bool | None = None
        self._shared = shared
        self._trainer = trainer
        self._name = name
        self._always = always
        self._divided: DividedNetwork | None = None
        self._segments: list[Segment] = []
        self._versions: list[tuple[int, int]] = []
        self._is_verified = False
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

    def forget_weights(self) -> None:
        """Between epochs weights may change in ways that leave no trace: look at them again."""
        self._versions = []

    @contextmanager
    def within(self, batch: Any) -> Iterator[None]:
        """A training step: while inside, the network runs on this batch of samples."""
        self._batch, self._is_within, self._num_calls = batch, True, 0
        try:
            yield
        finally:
            self._batch, self._is_within = None, False

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The network's ``forward``; while it runs, the network has its own, to be traced."""
        above = vars(self._network)["forward"]  # perhaps hung over this one, by heads for instance
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
        number = self._divided.num_frozen()
        if number == 0:
            return self._forward(*args, **kwargs)
        self._num_calls += 1
        if self._num_calls > 1:
            raise ConfigurationError(
                f"training_step calls {self._name!r} several times, and AutoCache keeps "
                "one activation per sample: several views are random augmentation as a rule. Train "
                "without AutoCache"
            )
        middle = self._divided.start(args, kwargs)
        self._update(number)
        if not self._is_worth_it(number, middle):
            return self._forward(*args, **kwargs)
        middle = self._read(middle)
        return self._divided.end(self._divided.piece(number, len(self._divided.atoms))(middle))

    def _update(self, number: int) -> None:
        """Follow what is frozen, and its weights."""
        assert self._divided is not None
        tensors = self._divided.tensors(number)
        versions = versions_of(tensors)
        if versions != self._versions or number != self._shared.cuts[-1]:
            self._versions = versions
            self._shared.cut(number)
            self._segments = [
                Segment(self._boundary(stop), self._divided.piece(start, stop))
                for start, stop in zip(self._shared.cuts, self._shared.cuts[1:], strict=False)
            ]
            if self._is_verified:
                self._let_skip()

    def _boundary(self, stop: int) -> Boundary:
        assert self._divided is not None
        return Boundary(
            f"{self._name}, {stop} atoms",
            fingerprint(*self._divided.tensors(stop)),
            self._shared.settings.dtype,
        )

    def _whole(self, middle: Middle) -> Middle:
        for segment in self._segments:
            middle = segment.function(middle)
        return middle

    def _is_worth_it(self, number: int, middle: Middle) -> bool:
        """Decide at the first batch with these frozen layers; on all ranks alike.

        What was worth it for fewer layers is so for more.
        """
        cache, settings = self._shared.cache, self._shared.settings
        if self.is_on or self._measured == number:
            return bool(self.is_on)
        assert cache is not None
        self._measured = number
        assert self._divided is not None
        refuse_random(self._name, lambda: self._whole(middle), self._divided.tensors(number))
        worth = measure(
            self._whole, middle, dtype=settings.dtype, disk=settings.uses_disk,
            folder=settings.folder,
        )  # fmt: skip
        worth = replace(worth, load=self._shared.seconds_saved)
        worth = self._trainer.strategy.broadcast(worth)
        in_memory, on_disk = (self._always or by for by in (worth.by_memory, worth.by_disk))
        is_on = in_memory or (on_disk and settings.uses_disk)
        cache.use(memory=in_memory, disk=on_disk)
        self.worth, self.is_on = worth, is_on
        if self._trainer.is_global_zero:
            log.info("activations are %s: %s", "cached" if is_on else "not cached", worth)
        return is_on

    def _read(self, middle: Middle) -> Middle:
        cache = self._shared.cache
        assert cache is not None
        ids = self._shared.ids_of(self._batch)
        if self._is_verified or not cache.num_kept(ids, self._segments):
            result: Middle = cache.outputs(ids, middle, self._segments)
            return result
        kept: Middle = cache.outputs(ids, middle, self._segments)
        if all(map(is_loaded, tensors_in(middle))):
            with torch.no_grad():
                refuse_other(self._name, kept, self._whole(middle), self._shared.settings.dtype)
        self._is_verified = True
        self._let_skip()
        return kept

    def _let_skip(self) -> None:
        cache = self._shared.cache
        if cache is not None and self._trainer.local_rank == 0:
            cache.let_skip(self._segments)
