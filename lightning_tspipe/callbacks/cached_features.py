"""Cached features of a trunk, for the heads of a pipeline.

The rank that reads the data decides for each batch which samples are cached. All ranks with heads
read from shared memory, and only one of them writes, so that they agree on what is cached::

    data rank   which samples are cached? the others' inputs ──► trunk
    rank 0      reads the cached ones, stores what the trunk returns for the others
    rank 1      reads the cached ones, takes the others from the trunk
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.caching import Boundary, Segment, fingerprint, measure_reading
from lightning_tspipe.caching.absent import check_loaded
from lightning_tspipe.caching.entries import rounded, rows_of
from lightning_tspipe.caching.keys import as_ids
from lightning_tspipe.callbacks.cached_layers import CachedLayers
from lightning_tspipe.callbacks.common import pipelined_of
from lightning_tspipe.callbacks.determinism import check_unchanged_outputs
from lightning_tspipe.callbacks.fit_cache import FitCache
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import sent
from lightning_tspipe.runtime.batches.metadata import Kept

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_tspipe.ir.pipeline import Pipeline
    from lightning_tspipe.runtime.transport.base import Transport
    from lightning_tspipe.strategy.training.pipelined import Pipelined

_SIZES = 8
"""Number of sizes of partly cached batches that go through the trunk: each size is planned."""


class CachedFeatures(CachedLayers):
    """Reads and stores the features that a trunk returns, by sample.

    Args:
        shared: The cache of this fit.
        trainer: The trainer.
        trunk: The trunk.
        always: Cache without asking whether it is worth it.

    Attributes:
        num_seen: Samples of the batches that the data rank looked at.
        num_known: Cache hits among them.

    Raises:
        ConfigurationError: The trunk is in train mode, where it may be random.
    """

    def __init__(
        self, shared: FitCache, trainer: Trainer, trunk: nn.Module, *, always: bool
    ) -> None:
        super().__init__(shared, trainer, "teacher", always=always)
        training = next((name for name, part in trunk.named_modules() if part.training), None)
        if training is not None:
            where = f"its part {training!r}" if training else "it"
            raise ConfigurationError(
                f"AutoCache caches what the trunk returns, and {where} is in train mode, where "
                "dropout and batch statistics change its output each time: call self.teacher.eval()"
            )
        self.is_on = True if always else None
        self.num_seen = self.num_known = 0
        self._trunk = trunk
        self._boundary = Boundary("")
        self._writes = False

    @override
    def start_epoch(self) -> None:
        self._pipelined.look_at_trunk()

    @property
    def _pipelined(self) -> Pipelined:
        pipelined = pipelined_of(self._trainer)
        assert pipelined is not None
        return pipelined

    def consider(self, seconds: float, features: Sequence[Tensor]) -> None:
        """On the data rank: measure whether reading is faster than running the trunk.

        Args:
            seconds: Seconds per step that would be saved.
            features: Placeholders for the features of a batch.
        """
        values = [tensor.cpu() for tensor in features]
        worth = measure_reading(values, len(values[0]), **self._shared.settings.how)
        compute = seconds / len(values[0])
        self.worth = replace(worth, compute=compute, load=self._shared.seconds_saved)

    def take_rate(self) -> float:
        """The hit rate of this epoch, on all ranks; resets the counts."""
        rate = self.num_known / self.num_seen if self.num_seen else 0.0
        self.num_seen = self.num_known = 0
        told: float = self._trainer.strategy.broadcast(rate, self._pipelined.data_rank)
        return told

    def place(self, transport: Transport, pipeline: Pipeline) -> None:
        """Follow the weights of the trunk, at the first batch and at each epoch; all ranks call it.

        Features of other weights are not read.
        """
        tensors = (*self._trunk.parameters(), *self._trunk.buffers())
        own = fingerprint(*(tensor for tensor in tensors if not tensor.is_meta))
        gathered = transport.gather_object((own, self.worth))
        told = None
        if gathered is not None:
            digest = hashlib.blake2b("".join(part for part, _ in gathered).encode(), digest_size=16)
            told = digest.hexdigest(), gathered[pipeline.data_rank][1]
        whole, self.worth = transport.broadcast_object(told, 0)
        before, self._boundary = self._boundary, Boundary("trunk", whole, self._dtype)
        self._writes = transport.rank == min(pipeline.loss_ranks)
        if self._shared.cache is None:
            return
        if before.name and before != self._boundary:
            self._is_verified = False
            # Before the data rank reads on; another rank might be too late.
            if transport.rank == pipeline.data_rank:
                self._cache.let_skip([])
        if self.is_on is None:
            assert self.worth is not None
            self._decide(self.worth, speaks=self._writes)

    def see(self, batch: Any, inputs: Sequence[Tensor]) -> Kept | None:
        """On the data rank: the samples of a batch that must go through the trunk."""
        cache = self._shared.cache
        if cache is None or not self.is_on:
            return None
        ids = as_ids(self._shared.ids_of(batch))
        _check_calls(inputs, len(ids))
        known = cache.kept(ids, [self._segment(())])
        self.num_seen += len(ids)
        self.num_known += sum(known)
        if not self._is_verified and any(known):
            self._is_verified = True
            return Kept(tuple(ids), tuple(range(len(ids))), compares=True)
        missing = [row for row, is_known in enumerate(known) if not is_known]
        size = -(-len(ids) // _SIZES)
        if missing and cache.may_lack_inputs:
            check_loaded([tensor.flatten(1)[missing, :1] for tensor in inputs if tensor.dim() > 1])
        padding = -len(missing) % size if len(missing) + size <= len(ids) else 0
        return Kept(tuple(ids), (*missing, *missing[:1] * padding))

    def whole(self, kept: Kept, computed: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """On a rank with heads: the features of a batch, read or computed."""
        segment = self._segment(computed, kept.rows)
        rows = torch.arange(len(kept.ids))  # on the host, which looks at them
        if kept.compares:
            self._compare(kept, computed, device)
            return segment.function(rows)  # type: ignore[no-any-return]
        if self._writes or not kept.rows:
            return list(self._cache.outputs(kept.ids, rows, [segment], device))
        known = sorted(set(range(len(kept.ids))) - set(kept.rows))
        if not known:
            return segment.function(rows)  # type: ignore[no-any-return]
        read = self._cache.outputs([kept.ids[row] for row in known], rows[known], [segment], device)
        others = sorted(set(kept.rows))
        order = sent(torch.tensor([*known, *others]).argsort(), device)
        made = segment.function(torch.tensor(others))
        return [torch.cat(pair).index_select(0, order) for pair in zip(read, made, strict=True)]

    def _segment(self, computed: Sequence[Tensor], rows: Sequence[int] = ()) -> Segment:
        """The trunk as a segment, whose outputs are given for some rows of the batch."""
        first = {row: index for index, row in reversed(list(enumerate(rows)))}
        place = torch.tensor([first.get(row, 0) for row in range(max(rows, default=-1) + 1)])

        def take(wanted: Tensor) -> list[Tensor]:
            index = place[wanted]
            return [rounded(rows_of(tensor, index), self._boundary.dtype) for tensor in computed]

        return Segment(self._boundary, take)

    def _compare(self, kept: Kept, computed: Sequence[Tensor], device: torch.device) -> None:
        """Compare what was read with what the inputs give now; then they need not be loaded.

        Raises:
            ConfigurationError: They differ.
        """
        if not self._writes:
            return
        segment = self._segment(computed, kept.rows)
        known = [row for row, it_is in enumerate(self._cache.kept(kept.ids, [segment])) if it_is]
        read = self._cache.outputs(kept.ids, torch.arange(len(kept.ids)), [segment], device)
        check_unchanged_outputs(
            self._name,
            [tensor[known] for tensor in read],
            [tensor[known] for tensor in computed],
            self._dtype,
        )
        self._cache.let_skip([segment])


def _check_calls(inputs: Sequence[Tensor], num_samples: int) -> None:
    if len(inputs) != 1:
        raise ConfigurationError(
            f"training_step calls the trunk {len(inputs)} times, and AutoCache has one entry per "
            "sample: several views usually mean random augmentation. Train without AutoCache"
        )
    if len(inputs[0]) != num_samples:
        raise ConfigurationError(
            f"the trunk gets {len(inputs[0])} rows for {num_samples} samples, and AutoCache has "
            "one entry per sample. Call the trunk with one row per sample, or remove AutoCache"
        )
