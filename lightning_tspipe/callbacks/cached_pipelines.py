"""Cached activations in pipelines: of a frozen prefix, and of a trunk with heads.

The rank that reads the data looks up the samples of a batch. For a frozen prefix it tells all ranks
up to which layer all of them are cached. The stages before that have nothing to do; the next one
reads what the last rank stored::

    epoch 1, layers 0-3 froze     rank 1 | inputs ─► 0 1 |─► rank 0 | 2 3 ─► store, trained layers|
    epoch 2                       rank 1 |               |   rank 0 |   read ─► trained layers    |
    epoch 3, layers 4-5 froze     rank 1 |  read ─► 4 5  |─► rank 0 |   store, trained layers     |

For a trunk it decides which samples are cached. All ranks with heads read from shared memory, and
only one of them writes, so that they agree on what is cached::

    data rank   which samples are cached? the others' inputs ──► trunk
    rank 0      reads the cached ones, stores what the trunk returns for the others
    rank 1      reads the cached ones, takes the others from the trunk
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_tspipe.caching import Boundary, Segment, Worth, entries, fingerprint, measure_reading
from lightning_tspipe.caching.keys import as_ids
from lightning_tspipe.callbacks.common import pipelined_of
from lightning_tspipe.callbacks.fit_cache import FitCache, tensors_of, versions_of
from lightning_tspipe.capture.plan import CallPlan, Inputs
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.late import sent
from lightning_tspipe.networks.codegen import Tensors
from lightning_tspipe.runtime.batches.metadata import NOTHING_KNOWN, Known
from lightning_tspipe.runtime.stages.frozen import FrozenPart
from lightning_tspipe.runtime.transport.base import Transport

log = logging.getLogger("lightning_tspipe")

_SIZES = 8
"""Number of sizes of partly cached batches that go through the trunk: each size is planned."""


def _worth(shared: FitCache, value: Any, num_samples: int, seconds: float) -> Worth:
    """What was measured for reading a batch, which takes so many seconds to compute."""
    worth = measure_reading(value, num_samples, **shared.how)
    return replace(worth, compute=seconds / num_samples)


class CachedPrefix:
    """Reads and stores what a pipeline's frozen prefix returns, by sample.

    Args:
        shared: The cache of this fit.
    """

    def __init__(self, shared: FitCache) -> None:
        self._shared = shared
        self._versions: dict[tuple[int, int], tuple[list[Tensor], list[tuple[int, int]]]] = {}
        self._tried: set[tuple[int, int]] = set()

    @property
    def num_known(self) -> int:
        """Number of atoms behind which outputs may be cached."""
        return self._shared.cuts[-1] if self._shared.is_on else 0

    # Before the prefix is cut; on all ranks

    def placed(
        self, part: FrozenPart, calls: Sequence[CallPlan], seconds: Callable[[], float]
    ) -> bool:
        """Prepare for a prefix that is about to be cut; its values are still here, on all ranks.

        Returns:
            Whether its outputs are going to be cached.
        """
        shared = self._shared
        if shared.cache is None or not self._can(calls):
            return False
        self._versions, self._tried = {}, set()
        call, chain = calls[0], part.routes[calls[0].route]
        passed = chain.shapes(*call.inputs, grad=False).boundaries[part.num_frozen]

        def measured() -> Worth:
            made = tuple(
                torch.zeros(spec.shape, dtype=spec.dtype, device=chain.device) for spec in passed
            )
            return _worth(shared, made, call.batch_size, seconds())

        # What was worth it for fewer layers is so for more.
        if not shared.is_on:
            shared.decide(measured)
        if shared.is_on:
            shared.divide(
                part.atoms[: part.num_frozen],
                lambda start, stop: partial(part.compute, start=start, stop=stop),
            )
        return bool(shared.is_on)

    def _can(self, calls: Sequence[CallPlan]) -> bool:
        """Whether processes can share a cache, and one entry per sample is enough."""
        why, trainer = "", self._shared.trainer
        pipelined = pipelined_of(trainer)
        assert pipelined is not None
        if len(calls) > 1:
            why = (
                f"training_step calls {self._shared.name!r} several times, and there is one entry "
                "per sample: several views usually mean random augmentation"
            )
        elif trainer.num_nodes > 1 and trainer.num_devices % pipelined.num_ranks:
            why = "a pipeline spans several machines, which don't share memory"
        if why and self._shared.is_required:
            raise ConfigurationError(f"{why}. Train with FreezeAndRepack(cache=None)")
        if why:
            log.info("activations are not cached: %s", why)
        return not why

    # While it runs

    def see(self, batch: Any, inputs: Inputs) -> Known:
        """On the data rank: look up the samples of a batch, given the inputs of its calls."""
        shared = self._shared
        ids = shared.ids_of(batch)
        behind = shared.opened.behind(ids, shared.segments)
        if shared.reads_first(behind, inputs):
            return Known(ids, is_checked=True)
        return Known(ids, shared.cuts[int(behind.min())])

    def run(
        self, part: FrozenPart, known: Known, rows: slice, received: Tensors, atoms: tuple[int, int]
    ) -> Tensors:
        """The output of some atoms for some samples of a batch.

        Args:
            part: The frozen part.
            known: The result of :meth:`see` for the batch.
            rows: The samples in it.
            received: Inputs of the first atom; nothing if they are cached.
            atoms: The first one, and one after the last.
        """
        shared, cache, (start, stop) = self._shared, self._shared.opened, atoms
        ids = as_ids(known.ids[rows])
        self._check(part, received, atoms)
        if received and atoms == (0, part.num_frozen) and not known.is_checked:
            passed: Tensors = cache.outputs(ids, received, shared.segments)
            return passed
        behind = cache.behind(ids, shared.segments)
        value = received
        if not received:
            value = self._merged(None, ids, behind, start)
        elif start == 0 and not known.is_checked and cache.may_lack_inputs:
            value = _filled(received, behind > 0)
        for first, last in pairwise([start, *(c for c in shared.cuts if start < c < stop), stop]):
            if first == last:
                break
            value = part.compute(value, first, last)
            if last in shared.cuts:
                value = entries.rounded(value, shared.dtype)
                value = self._merged(value, ids, behind, last, is_checked=known.is_checked)
        if stop == part.num_frozen:
            cache.count(behind, shared.segments)
            cache.keep(ids, value, shared.segments, behind)
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
        shared, chosen = self._shared, [ids[index] for index in kept]
        boundary, device = shared.segments[number - 1].boundary, shared.trainer.strategy.root_device
        read: Tensors = shared.opened.read(chosen, boundary, device)
        if is_checked:
            assert value is not None
            shared.check_unchanged(read, entries.rows_of(value, kept))
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
            found = tensors_of(part.atoms[slice(*atoms)])
            self._versions[atoms] = found, versions_of(found)
        tensors, before = self._versions[atoms]
        if before != versions_of(tensors):
            raise ConfigurationError(
                f"frozen weights of {self._shared.name!r} have changed since their outputs were "
                "cached. Leave them unchanged, or train with FreezeAndRepack(cache=None)"
            )
        if received and atoms not in self._tried and all(map(entries.is_loaded, received)):
            self._tried.add(atoms)
            self._shared.check_deterministic(lambda: part.compute(received, *atoms), tensors)


def _filled(received: Tensors, known: NDArray[np.bool_]) -> Tensors:
    """Inputs with zeros for samples that were not loaded, since they are cached at a later cut."""
    filled = []
    for tensor in received:
        gone = entries.absent_rows(tensor)
        entries.check_loaded(entries.rows_of(tensor, np.flatnonzero(~known)))
        shape = (-1, *[1] * (tensor.dim() - 1))
        filled.append(torch.where(gone.view(shape), tensor.new_zeros(()), tensor))
    return tuple(filled)


class CachedFeatures:
    """Reads and stores the features that a trunk returns, by sample.

    Args:
        shared: The cache of this fit.
        trunk: The trunk.

    Raises:
        ConfigurationError: The trunk is in train mode, where it may be random.
    """

    def __init__(self, shared: FitCache, trunk: nn.Module) -> None:
        training = next((name for name, part in trunk.named_modules() if part.training), None)
        if training is not None:
            where = f"its part {training!r}" if training else "it"
            raise ConfigurationError(
                f"AutoCache caches what the trunk returns, and {where} is in train mode, where "
                "dropout and batch statistics change its output each time: call self.teacher.eval()"
            )
        self._shared = shared
        self._trunk = trunk
        self._writes = False
        self._worth: Any = None  # on the data rank, once it is measured

    def consider(self, seconds: float, features: Sequence[Tensor]) -> None:
        """On the data rank: measure whether reading is faster than running the trunk.

        Args:
            seconds: Seconds per step that would be saved.
            features: Placeholders for the features of a batch.
        """
        values = [tensor.cpu() for tensor in features]
        self._worth = _worth(self._shared, values, len(values[0]), seconds)

    def place(self, transport: Transport, pipeline: Pipeline) -> None:
        """Follow the weights of the trunk, at the first batch and at each epoch; all ranks call it.

        Features of other weights are not read.
        """
        shared = self._shared
        tensors = (*self._trunk.parameters(), *self._trunk.buffers())
        own = fingerprint(*(tensor for tensor in tensors if not tensor.is_meta))
        gathered = transport.broadcast_object(transport.gather_object(own), 0)
        whole = hashlib.blake2b("".join(gathered).encode(), digest_size=16).hexdigest()
        boundary = Boundary("trunk", whole, shared.dtype)
        before, shared.segments = shared.segments, [Segment(boundary, self._trunk)]
        self._writes = transport.rank == min(pipeline.loss_ranks)
        if shared.cache is None:
            return
        if before and before != shared.segments:
            shared.is_verified = False
            # Before the data rank reads on; another rank might be too late.
            if transport.rank == pipeline.data_rank:
                shared.cache.let_skip([])
        if shared.is_on is None:
            shared.decide(lambda: self._worth, pipeline.data_rank)

    def see(self, batch: Any, inputs: Inputs) -> Known:
        """On the data rank: the samples of a batch that must go through the trunk."""
        shared, cache = self._shared, self._shared.cache
        if cache is None or not shared.is_on:
            return NOTHING_KNOWN
        ids = as_ids(shared.ids_of(batch))
        _check_calls(inputs, len(ids))
        behind = cache.behind(ids, shared.segments)
        cache.count(behind, shared.segments)
        if not shared.is_verified and behind.any():
            shared.is_verified = True
            return Known(ids, rows=tuple(range(len(ids))), is_checked=True)
        missing = np.flatnonzero(behind == 0).tolist()
        size = -(-len(ids) // _SIZES)
        if missing and cache.may_lack_inputs:
            entries.check_loaded(
                [tensor.flatten(1)[missing, :1] for tensor in inputs[0] if tensor.dim() > 1]
            )
        padding = -len(missing) % size if len(missing) + size <= len(ids) else 0
        return Known(ids, rows=(*missing, *missing[:1] * padding))

    def whole(self, known: Known, computed: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """On a rank with heads: the features of a batch, read or computed."""
        rows = known.rows or ()
        number = len(set(rows))  # one may come again and again, behind the others
        others = sorted(set(range(len(known.ids))).difference(rows))
        parts: list[tuple[Any, list[Tensor]]] = []
        if number:
            values = entries.rows_of(list(computed), range(number))
            parts.append((rows[:number], entries.rounded(values, self._shared.dtype)))
        if others:
            parts.append((others, self._read(known.ids, others, device)))
        whole: list[Tensor] = entries.assembled(parts)
        if self._writes:
            cache, segments = self._shared.opened, self._shared.segments
            behind = cache.behind(known.ids, segments)
            if known.is_checked:  # and from now on inputs need not be loaded
                kept = np.flatnonzero(behind).tolist()
                self._shared.check_unchanged(
                    self._read(known.ids, kept, device), [tensor[kept] for tensor in computed]
                )
                cache.let_skip(segments)
            cache.keep(known.ids, whole, segments, behind)
        return whole

    def _read(self, ids: Any, rows: Sequence[int], device: torch.device) -> list[Tensor]:
        boundary = self._shared.segments[0].boundary
        return list(self._shared.opened.read([ids[row] for row in rows], boundary, device))


def _check_calls(inputs: Inputs, num_samples: int) -> None:
    if len(inputs) != 1:
        raise ConfigurationError(
            f"training_step calls the trunk {len(inputs)} times, and AutoCache has one entry per "
            "sample: several views usually mean random augmentation. Train without AutoCache"
        )
    if len(inputs[0][0]) != num_samples:
        raise ConfigurationError(
            f"the trunk gets {len(inputs[0][0])} rows for {num_samples} samples, and AutoCache has "
            "one entry per sample. Call the trunk with one row per sample, or remove AutoCache"
        )
