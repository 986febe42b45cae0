"""The activation cache of one fit, shared by all processes of a machine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tspipe.caching import ActivationCache, WithIds, check_repeatable
from lightning_tspipe.caching.arena import available_disk, available_memory, megabytes
from lightning_tspipe.caching.inputs import Path, ids_of
from lightning_tspipe.caching.on_host import OnHost
from lightning_tspipe.callbacks.common import replaced
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger("lightning_tspipe")

_SHARE = 4
"""A budget that is not given is this fraction of what is free."""


@dataclass(frozen=True)
class CacheSettings:
    """Budgets and format of a cache.

    Attributes:
        memory: Bytes of each machine's shared memory; None: a quarter of its free memory.
        disk: Bytes of each machine's disk; None: a quarter of the free space.
        folder: A folder on the file system to use; None: the system's temporary folder.
        dtype: Type in which floating-point numbers are stored; None: their own.
        ids: Number or key of the sample ids in a batch; None: where ``WithIds`` puts them.
    """

    memory: int | None = None
    disk: int | None = 0
    folder: str | os.PathLike[str] | None = None
    dtype: torch.dtype | None = None
    ids: Path | None = None

    @property
    def how(self) -> dict[str, Any]:
        """Keyword arguments for measuring how long reading takes."""
        return {"dtype": self.dtype, "disk": self.uses_disk, "folder": self.folder}

    @property
    def uses_disk(self) -> bool:
        """Whether anything may be stored on disk."""
        return self.disk != 0

    def budgets(self) -> tuple[int, int]:
        """Bytes of memory and disk, on this machine at this moment."""
        memory, disk = self.memory, self.disk
        if memory is None:
            memory = (available_memory() or 2**32) // _SHARE
        if disk is None:
            disk = available_disk(self.folder) // _SHARE
        if None in {self.memory, self.disk}:
            log.info(
                "cached activations may take %s of memory and %s on disk; give other budgets with "
                "AutoCache(memory=..., disk=...)", megabytes(memory), megabytes(disk),
            )  # fmt: skip
        return memory, disk


class FitCache:
    """Opens a cache when the training loader is made, before its workers start.

    Args:
        settings: Budgets and format.
        is_required: Whether it is an error if nothing can be cached, instead of a line in the log.

    Attributes:
        cache: The cache; None before and after the fit, and where nothing can be cached.
        dataset: The loader's dataset.
        cuts: Numbers of frozen atoms, one for each step of freezing. They belong to the run, since
            a cache with a ``dtype`` rounds at each of them.
        seconds_saved: Seconds to load and decode a sample, if a hit saves them; else 0.
    """

    def __init__(self, settings: CacheSettings, *, is_required: bool = True) -> None:
        self.settings = settings
        self.is_required = is_required
        self.cache: ActivationCache | None = None
        self.dataset: Any = None
        self.cuts = [0]
        self.seconds_saved = 0.0
        self._undo: list[Callable[[], None]] = []
        self._on_host = OnHost()
        self._epoch: int | None = None
        self._is_given_up = False

    def follow(self, trainer: Trainer) -> None:
        """Open the cache with the training loader of this fit; every rank calls it."""
        self.close()
        self._is_given_up = False
        self.cuts = [0]
        strategy: Any = trainer.strategy
        process = strategy.process_dataloader

        def process_dataloader(dataloader: Any) -> Any:
            if trainer.training:
                self._open_or_go_on(trainer, dataloader)
            return process(dataloader)

        module: Any = trainer.lightning_module
        move = module._apply_batch_transfer_handler  # noqa: SLF001 - all ways to the device

        def to_device(*args: Any, **kwargs: Any) -> Any:
            with self._on_host.noting():
                return move(*args, **kwargs)

        self._undo += [
            replaced(strategy, "process_dataloader", process_dataloader),
            replaced(module, move.__name__, to_device),
        ]

    def _open_or_go_on(self, trainer: Trainer, loader: Any) -> None:
        if self._is_given_up:
            return
        if self.cache is None:
            self._epoch = trainer.current_epoch
            self.open(trainer, loader)
        elif trainer.current_epoch == self._epoch:
            raise ConfigurationError(
                "the fit has several training loaders, whose samples may have the same ids: train "
                "with one loader, for instance of a ConcatDataset, or without the cache"
            )
        else:  # a new loader for a new epoch
            self._epoch, self.dataset = trainer.current_epoch, getattr(loader, "dataset", None)
            if isinstance(self.dataset, WithIds):
                self.dataset.read_from(self.cache)

    def ids_of(self, batch: Any) -> Any:
        """The sample ids of a batch, on the host: a tensor, or as they are.

        Raises:
            ConfigurationError: The batch has none.
        """
        found = ids_of(batch, self.settings.ids)
        return self._on_host.of(found) if isinstance(found, Tensor) else found

    def cut(self, number: int) -> None:
        """Note the number of atoms that are frozen now."""
        self.cuts = [cut for cut in self.cuts if cut < number] + [number]

    def expect_loader(self) -> None:
        """Expect a new training loader in this epoch."""
        self._epoch = None

    def open(self, trainer: Trainer, loader: Any) -> None:
        """Make the cache on one rank of each machine, and share it; every rank calls it.

        Raises:
            ConfigurationError: On every rank: samples without ids, samples that differ each time
                they are read, or budgets that exceed what is free.
        """
        dataset = getattr(loader, "dataset", None)
        box: Any = None
        if trainer.local_rank == 0:
            try:
                self.cache = self._made(dataset, check=trainer.is_global_zero)
                self.seconds_saved = _seconds_to_load(loader)
                box = self.cache.handle
            except Exception as error:  # noqa: BLE001 - all ranks are to know it
                box = error
        boxes = [
            trainer.strategy.broadcast(box, src=node * max(1, trainer.num_devices))
            for node in range(trainer.num_nodes)
        ]
        for found in boxes:
            if isinstance(found, Exception):
                self._give_up(trainer, found)
                return
        if self.cache is None:
            self.cache = ActivationCache.attach(boxes[trainer.node_rank])
        self.dataset = dataset
        if isinstance(dataset, WithIds):
            dataset.read_from(self.cache)

    def _give_up(self, trainer: Trainer, why: Exception) -> None:
        if self.is_required or not isinstance(why, ConfigurationError):
            raise why
        if self.cache is not None:
            self.cache.close()
        self.cache, self._is_given_up = None, True
        if trainer.is_global_zero:
            log.info("activations of frozen layers are not cached: %s", why)

    def _made(self, dataset: Any, *, check: bool) -> ActivationCache:
        try:
            num_samples = len(dataset)
        except TypeError:
            raise ConfigurationError(
                "activations are cached by sample: train with a DataLoader of WithIds(dataset), "
                f"whose dataset has a length; {type(dataset).__name__} has none"
            ) from None
        if self.settings.ids is None and not isinstance(dataset, WithIds):
            raise ConfigurationError(
                "activations are cached by sample, and these samples have no ids: train with "
                "DataLoader(WithIds(dataset)), or say where ids are in a batch (ids=)"
            )
        if check:
            check_repeatable(dataset)
        return ActivationCache(num_samples, *self.settings.budgets(), self.settings.folder)

    def close(self) -> None:
        """Discard the cache; twice is fine."""
        while self._undo:
            self._undo.pop()()
        if isinstance(self.dataset, WithIds):
            self.dataset.read_from(None)
        if self.cache is not None:
            self.cache.close()
        self.cache = self.dataset = None


def _seconds_to_load(loader: Any) -> float:
    """Seconds to load a sample, if cached samples are not loaded; else 0."""
    dataset = loader.dataset
    if not (isinstance(dataset, WithIds) and dataset.inputs):
        return 0.0
    num = min(4, len(dataset))
    started = time.perf_counter()
    for index in range(num):
        dataset[index]
    workers = max(1, getattr(loader, "num_workers", 0))
    return (time.perf_counter() - started) / num / workers
