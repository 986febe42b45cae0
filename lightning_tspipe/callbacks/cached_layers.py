"""Base of the readers of cached activations: frozen layers, read or else computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tspipe.caching import ActivationCache, Boundary, Segment, Worth, fingerprints
from lightning_tspipe.callbacks.fit_cache import FitCache

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger("lightning_tspipe")


class CachedLayers:
    """Frozen layers of a network whose outputs are cached by sample, while a fit lasts.

    Args:
        shared: The cache of this fit.
        trainer: The trainer.
        name: Name of the network, for messages.
        always: Cache without asking whether it is worth it.

    Attributes:
        worth: What was measured; None before, and where nothing was.
        is_on: Whether activations are cached; None before it is decided.
    """

    def __init__(self, shared: FitCache, trainer: Trainer, name: str, *, always: bool) -> None:
        self.worth: Worth | None = None
        self.is_on: bool | None = None
        self._shared = shared
        self._trainer = trainer
        self._name = name
        self._always = always
        self._segments: list[Segment] = []
        self._is_verified = False

    def start_epoch(self) -> None:
        """Between epochs weights may change in ways that leave no trace; every rank calls it."""

    @property
    def _cache(self) -> ActivationCache:
        assert self._shared.cache is not None
        return self._shared.cache

    @property
    def _dtype(self) -> torch.dtype | None:
        return self._shared.settings.dtype

    @property
    def _speaks(self) -> bool:
        """Whether this is the one process of its machine that tells datasets what to skip."""
        return self._trainer.local_rank == 0

    def _let_skip(self) -> None:
        """Inputs of samples that are cached need no longer be loaded."""
        if self._speaks:
            self._cache.let_skip(self._segments)

    def _decide(self, worth: Worth, *, speaks: bool) -> None:
        """Cache where reading is faster than computing; every rank with the same numbers."""
        in_memory, on_disk = (self._always or faster for faster in (worth.by_memory, worth.by_disk))
        self._cache.use(memory=in_memory, disk=on_disk)
        self.worth = worth
        self.is_on = in_memory or (on_disk and self._shared.settings.uses_disk)
        if speaks:
            log.info("activations are %s: %s", "cached" if self.is_on else "not cached", worth)

    def _divide(
        self,
        number: int,
        tensors: Callable[[int, int], Sequence[Tensor]],
        function: Callable[[int, int], Callable[[Any], Any]],
    ) -> None:
        """Make segments of the frozen atoms: one for each step of freezing.

        Args:
            number: Atoms that are frozen now.
            tensors: Parameters and buffers of the atoms from the first number up to the second.
            function: Runs these atoms.
        """
        self._shared.cut(number)
        spans = list(pairwise(self._shared.cuts))
        prints = fingerprints([tensors(*span) for span in spans])
        self._segments = [
            Segment(Boundary(f"{self._name}, {span[1]} atoms", text, self._dtype), function(*span))
            for span, text in zip(spans, prints, strict=True)
        ]
