"""Cached frozen prefix of a pipelined network.

The data rank looks up the samples of a batch, and tells all ranks up to which layer all of them are
cached. The stages before that have nothing to do; the next one reads what the last rank stored::

    epoch 1, layers 0-3 froze     rank 1 | inputs ─► 0 1 |─► rank 0 | 2 3 ─► store, trained layers|
    epoch 2                       rank 1 |               |   rank 0 |   read ─► trained layers    |
    epoch 3, layers 4-5 froze     rank 1 |  read ─► 4 5  |─► rank 0 |   store, trained layers     |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.caching import Worth, measure_reading
from lightning_tspipe.caching.absent import absent_rows, check_loaded, is_loaded
from lightning_tspipe.caching.entries import rounded, rows_of
from lightning_tspipe.callbacks.cached_layers import CachedLayers
from lightning_tspipe.callbacks.determinism import (
    check_deterministic,
    check_unchanged_outputs,
    versions_of,
)
from lightning_tspipe.callbacks.fit_cache import FitCache
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import sent
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.runtime.batches.metadata import Samples

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import nn

    from lightning_tspipe.runtime.stages.frozen import Call, FrozenPart

log = logging.getLogger("lightning_tspipe")


class CachedPrefix(CachedLayers):
    """Reads and stores what a pipeline's frozen prefix returns, by sample."""

    def __init__(self, shared: FitCache, trainer: Trainer, name: str, *, always: bool) -> None:
        super().__init__(shared, trainer, name, always=always)
        self._samples: dict[int, Samples] = {}
        self._versions: dict[tuple[int, int], tuple[list[Tensor], list[tuple[int, int]]]] = {}
        self._tried: set[tuple[int, int]] = set()
        self._device: torch.device | None = None

    @property
    def num_known(self) -> int:
        """Number of atoms behind which outputs may be cached."""
        return self._shared.cuts[-1] if self.is_on else 0

    @property
    @override
    def _speaks(self) -> bool:
        """Whether this is the first rank of its machine that reads data."""
        return bool(self._trainer.local_rank == self._pipelined.data_rank)

    @property
    def _pipelined(self) -> Any:
        return self._trainer.strategy.pipelined  # type: ignore[attr-defined]

    # Before the prefix is cut; on all ranks

    def placed(self, part: FrozenPart, calls: Sequence[Call]) -> bool:
        """Prepare for a prefix that is about to be cut; its values are still here, on all ranks.

        Returns:
            Whether its outputs are going to be cached.
        """
        if self._shared.cache is None or not self._can(calls):
            return False
        self._versions, self._tried, self._samples = {}, set(), {}
        if not self.is_on:
            self._measure(calls[0], part.device)
        if not self.is_on:
            return False
        tensors = _tensors_of(part, self._trainer.lightning_module)
        self._divide(part.num_frozen, tensors, partial(_function, part))
        if self._is_verified:
            self._let_skip()
        return True

    def _can(self, calls: Sequence[Call]) -> bool:
        """Whether processes can share a cache, and one entry per sample is enough."""
        why = ""
        if len(calls) > 1:
            why = (
                f"training_step calls {self._name!r} several times, and there is one entry per "
                "sample: several views usually mean random augmentation"
            )
        elif self._trainer.num_nodes > 1 and self._trainer.num_devices % self._pipelined.num_ranks:
            why = "a pipeline spans several machines, which don't share memory"
        if why and self._shared.is_required:
            raise ConfigurationError(f"{why}. Train with FreezeAndRepack(cache=None)")
        if why:
            log.info("activations are not cached: %s", why)
        return not why

    def _measure(self, call: Call, device: torch.device) -> None:
        """Decide whether reading is faster than computing, as measured on rank 0.

        What was worth it for fewer layers is so for more.
        """
        if self._always:
            self.is_on = True
            return
        box: Worth | None = None
        if self._trainer.is_global_zero:
            num_samples = call.taken.shape[0]
            made = tuple(
                torch.zeros(spec.shape, dtype=spec.dtype, device=device) for spec in call.passed
            )
            worth = measure_reading((made, {}), num_samples, **self._shared.settings.how)
            load = self._shared.seconds_saved
            box = replace(worth, compute=call.seconds() / num_samples, load=load)
        found: Any = self._trainer.strategy.broadcast(box)
        self._decide(found, speaks=self._trainer.is_global_zero)

    # While it runs

    def see(self, batch: Any, inputs: Sequence[Tensor]) -> Samples:
        """On the data rank: look up the samples of a batch, given the inputs of its calls."""
        ids = self._shared.ids_of(batch)
        behind = self._cache.behind(ids, self._segments)
        if behind.any() and not self._is_verified:
            self._is_verified = True
            self._let_skip()
            if all(map(is_loaded, inputs)):
                return Samples(ids, is_checked=True)
        return Samples(ids, self._shared.cuts[int(behind.min())])

    def expect(self, batches: Mapping[int, Samples | None]) -> None:
        """Set the batches of a step, by their numbers."""
        self._samples = {number: x for number, x in batches.items() if x is not None}

    def run(
        self, part: FrozenPart, place: tuple[int, slice], received: Tensors, atoms: tuple[int, int]
    ) -> Tensors:
        """The output of some atoms for some samples of a batch.

        Args:
            part: The frozen part.
            place: The batch, and the rows in it.
            received: Inputs of the first atom; nothing if they are cached.
            atoms: The first one, and one after the last.
        """
        cache, (number, rows) = self._cache, place
        self._device = part.device
        samples, (start, stop) = self._samples[number], atoms
        ids = samples.ids[rows]
        self._check(part, received, atoms)
        if received and atoms == (0, part.num_frozen) and not samples.is_checked:
            passed: Tensors = cache.outputs(ids, (received, {}), self._segments)[0]
            return passed
        behind = cache.behind(ids, self._segments)
        value = received
        if not received:
            value = self._merged(None, ids, behind, start)
        elif start == 0 and not samples.is_checked and cache.may_lack_inputs:
            value = _filled(received, behind > 0)
        for first, last in pairwise(
            [start, *(c for c in self._shared.cuts if start < c < stop), stop]
        ):
            if first == last:
                break
            value = part.compute(value, first, last)
            if last in self._shared.cuts:
                value = rounded(value, self._dtype)
                value = self._merged(value, ids, behind, last, is_checked=samples.is_checked)
        if stop == part.num_frozen:
            cache.keep(ids, (value, {}), self._segments, behind)
        return value

    def _merged(
        self, value: Tensors | None, ids: Any, behind: Any, cut: int, *, is_checked: bool = False
    ) -> Tensors:
        """The outputs at a cut: computed ones, with those that are cached there filled in.

        Args:
            value: The computed outputs; None if all samples are cached.
            ids: Ids of the samples.
            behind: The number of segments behind which each sample is cached.
            cut: Number of atoms before the cut.
            is_checked: Only compare, and change nothing.
        """
        number = self._shared.cuts.index(cut)
        kept = np.flatnonzero(behind == number)
        if value is not None and not len(kept):
            return value
        chosen = ids[torch.from_numpy(kept)] if isinstance(ids, Tensor) else [ids[k] for k in kept]
        read: Tensors = self._cache.read(chosen, self._segments[number - 1].boundary, self._device)[
            0
        ]
        if is_checked:
            assert value is not None
            fresh = rows_of(value, kept)
            check_unchanged_outputs(self._name, read, fresh, self._dtype)
            return value
        if len(kept) == len(behind):
            return read
        if value is None:  # the others are cached at a later cut, and are filled in there
            value = tuple(t.new_zeros(len(behind), *t.shape[1:]) for t in read)
        into = sent(torch.from_numpy(kept), value[0].device)
        return tuple(t.index_copy(0, into, r) for t, r in zip(value, read, strict=True))

    def _check(self, part: FrozenPart, received: Tensors, atoms: tuple[int, int]) -> None:
        """Refuse random layers, and weights that have changed since they were frozen."""
        if atoms not in self._versions:
            found = _tensors_of(part, self._trainer.lightning_module)(*atoms)
            self._versions[atoms] = found, versions_of(found)
        tensors, before = self._versions[atoms]
        if before != versions_of(tensors):
            raise ConfigurationError(
                f"frozen weights of {self._name!r} have changed since their outputs were cached. "
                "Leave them unchanged, or train with FreezeAndRepack(cache=None)"
            )
        if received and atoms not in self._tried and all(map(is_loaded, received)):
            self._tried.add(atoms)
            check_deterministic(self._name, lambda: part.compute(received, *atoms), tensors)


def _tensors_of(part: FrozenPart, module: nn.Module) -> Any:
    """A function that returns the parameters and buffers of a range of atoms."""
    own: dict[str, Tensor] = {}
    own.update(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))

    def of(start: int, stop: int) -> list[Tensor]:
        return [
            own[name]
            for atom in part.atoms[start:stop]
            for name in (*atom.parameter_names, *atom.buffer_names)
        ]

    return of


def _function(part: FrozenPart, start: int, stop: int) -> Any:
    """Some atoms as the cache calls them: on tensors, beside an empty structure."""
    return lambda value: (part.compute(value[0], start, stop), {})


def _filled(received: Tensors, known: NDArray[np.bool_]) -> Tensors:
    """Inputs with zeros for samples that were not loaded, since they are cached at a later cut."""
    filled = []
    for tensor in received:
        gone = absent_rows(tensor)
        check_loaded(rows_of(tensor, np.flatnonzero(~known)))
        shape = (-1, *[1] * (tensor.dim() - 1))
        filled.append(torch.where(gone.view(shape), tensor.new_zeros(()), tensor))
    return tuple(filled)
