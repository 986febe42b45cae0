"""Activation cache for frozen layers: read what they returned in an earlier epoch."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_tspipe.caching import Worth
from lightning_tspipe.caching.cache import Counts
from lightning_tspipe.caching.inputs import Path
from lightning_tspipe.callbacks.cached_features import CachedFeatures
from lightning_tspipe.callbacks.cached_forward import CachedForward
from lightning_tspipe.callbacks.cached_layers import CachedLayers
from lightning_tspipe.callbacks.common import Restoring, pipelined_of, replaced, submodules
from lightning_tspipe.callbacks.fit_cache import CacheSettings, FitCache
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.heads import StudentFanout
from lightning_tspipe.strategy.setup.options import parse_bytes

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger("lightning_tspipe")


class AutoCache(Restoring):
    """Caches the activations of a network's frozen first layers by sample; trains the rest on them.

    Frozen layers are those at the beginning of the network whose ``requires_grad`` is False,
    however and whenever that happened: by hand, by ``FreezeAndRepack``, by Lightning's finetuning
    callbacks. From the next epoch on their activations are read. The mathematics does not change,
    so the inputs must be the same in every epoch and the frozen layers must be in eval mode; random
    augmentation and dropout raise an error.

    The samples need ids: ``DataLoader(WithIds(dataset))``. With ``WithIds(dataset, inputs=0)``,
    inputs whose activations are cached are not even loaded.

    The first batch with frozen layers measures whether reading is faster than computing; if it is
    not, nothing is cached. ``cache_hit_rate`` is logged at the end of each epoch.

    Args:
        network: Dotted name of the network; None: the trunk ``teacher`` of heads
            (``StudentFanout``), else ``student``.
        memory: Bytes of memory on each machine, or a text such as ``"4GiB"``; ``"auto"``: a quarter
            of the free memory.
        disk: Bytes on disk, or a text, or ``"auto"``: a quarter of the free space.
        folder: A folder on the file system to use; None: the system's temporary folder.
        dtype: Type in which activations are stored, such as ``torch.bfloat16`` or ``"bfloat16"``;
            None: their own. With a type, all activations are rounded to it, whether read or
            computed, so that the result does not depend on what was cached; and nothing is
            measured, as with ``always``.
        ids: Number or key of the sample ids in a batch; None: where ``WithIds`` puts them.
        always: Cache without measuring, as with ``Trainer(deterministic=True)``.

    Attributes:
        shared: The cache of the fit, and its settings.

    Raises:
        ConfigurationError: There is no such network; samples have no ids; inputs or layers are
            random; a budget exceeds what is free.
    """

    def __init__(  # noqa: PLR0913 - settings by keyword
        self,
        network: str | None = None,
        *,
        memory: int | str = "auto",
        disk: int | str = 0,
        folder: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | str | None = None,
        ids: Path | None = None,
        always: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.always = always
        settings = CacheSettings(_as_bytes(memory), _as_bytes(disk), folder, _as_dtype(dtype), ids)
        self.shared = FitCache(settings)
        self._layers: CachedLayers | None = None

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__qualname__}({self.network})"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        has_heads = isinstance(getattr(pl_module, "student", None), StudentFanout)
        pipelined = pipelined_of(trainer)
        if pipelined is not None and not (has_heads and self.network in {None, "teacher"}):
            raise ConfigurationError(
                "AutoCache works on ordinary strategies, and under a pipeline on the trunk of "
                "heads (StudentFanout). For other pipelines use FreezeAndRepack(cache=...)"
            )
        if pipelined is not None and trainer.num_nodes > 1:
            raise ConfigurationError(
                "AutoCache stores features in the memory of one machine, and heads of a pipeline "
                f"over {trainer.num_nodes} machines could not read them. Remove the callback"
            )
        self.network = self.network or ("teacher" if has_heads else "student")
        submodules(pl_module, self.network, "network")
        self.shared.follow(trainer)
        if pipelined is not None:
            trunk, always = pl_module.get_submodule(self.network), self.keeps_always(trainer)
            self._layers = features = CachedFeatures(self.shared, trainer, trunk, always=always)
            pipelined.use_features(features)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pipelined_of(trainer) is not None:
            return
        super().restore()
        assert self.network is not None
        network, always = pl_module.get_submodule(self.network), self.keeps_always(trainer)
        self._layers = front = CachedForward(
            self.shared, trainer, network, self.network, always=always
        )
        step = pl_module.training_step

        @functools.wraps(step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            with front.within(batch):
                return step(batch, *args, **kwargs)

        self.undo += [front.close, replaced(pl_module, "training_step", training_step)]

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._layers is not None:
            self._layers.start_epoch()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.shared.cache is not None and self.is_on:
            rate = self.take_hit_rate(trainer)
            is_ordinary = pipelined_of(trainer) is None  # else all ranks know it
            pl_module.log("cache_hit_rate", rate, sync_dist=is_ordinary, batch_size=1)

    def take_hit_rate(self, trainer: Trainer) -> float:
        """The share of this epoch's samples that were read from the cache; resets the counts.

        Of the samples of this rank, or under a pipeline of all ranks.
        """
        cache = self.shared.cache
        if cache is None:
            return 0.0
        if isinstance(self._layers, CachedFeatures):
            return self._layers.take_rate()
        if trainer.is_global_zero:
            log.info("epoch %d: %s", trainer.current_epoch, repr(cache))
        counts, cache.counts = cache.counts, Counts()
        if counts.refused:
            log.warning(
                "epoch %d: %d samples found no space in the cache and are computed in every epoch. "
                "Give AutoCache more memory, or a disk budget",
                trainer.current_epoch, counts.refused,
            )  # fmt: skip
        pipelined = pipelined_of(trainer)
        if pipelined is None:
            return counts.hit_rate
        read, computed = pipelined.sums([counts.hits + counts.pushed, counts.misses])
        return read / max(1.0, read + computed)

    @override
    def restore(self) -> None:
        super().restore()
        self.shared.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """The numbers of frozen atoms, one for each step of freezing."""
        return {"cuts": self.shared.cuts}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shared.cuts = list(state_dict["cuts"])

    def keeps_always(self, trainer: Trainer) -> bool:
        """Whether to cache without measuring.

        That is so if the user says it, if decisions must not depend on measured times, and if
        activations are rounded: then the result depends on whether they are cached.
        """
        pipelined = pipelined_of(trainer)
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        if pipelined is not None:
            is_deterministic = not pipelined.decides_by_times
        return self.always or self.shared.settings.dtype is not None or is_deterministic

    @property
    def worth(self) -> Worth | None:
        """The measured times of this fit, or of the last one; None before."""
        return None if self._layers is None else self._layers.worth

    @property
    def is_on(self) -> bool | None:
        """Whether activations are cached; None before that is decided."""
        return None if self._layers is None else self._layers.is_on


def _as_bytes(amount: int | str) -> int | None:
    """A budget in bytes; None for a share of what is free."""
    return None if amount == "auto" else parse_bytes(amount)


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = dtype
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), dtype)
    if found is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise ConfigurationError(f"AutoCache(dtype={dtype!r}): give a floating-point type")
